"""Masked LM: golden vectors, exact counts per selection rule, frequencies, whole words, the guard."""

import math

import numpy as np
import pytest
import torch

from hf_xformers.objectives import MaskedLMObjective, word_unit_ids
from hf_xformers.objectives.masked_lm import (
    KEEP,
    MASK,
    RANDOM,
    MaskNoise,
    _fill_budget,
    apply_noise,
    sample_noise,
    select_targets,
)

SELECTIONS = ["bert", "roberta", "hf", "ngram"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def specials(length, *positions):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(positions)] = True
    return mask


def bounds(count, probability):
    """4 standard deviations of a binomial count."""
    return 4 * math.sqrt(count * probability * (1 - probability))


# --- apply ----------------------------------------------------------------------------------------------------------


def test_golden_vector():
    ids = torch.tensor([2, 10, 11, 12, 13, 14, 3])
    selected = torch.tensor([0, 0, 1, 0, 1, 1, 0]).bool()
    action = torch.tensor(
        [MASK, RANDOM, MASK, RANDOM, RANDOM, KEEP, MASK], dtype=torch.int8
    )  # junk where not selected
    random_ids = torch.tensor([90, 91, 92, 93, 17, 95, 96])
    inputs, labels = apply_noise(ids, MaskNoise(selected, action, random_ids), mask_token_id=4)
    assert inputs.tolist() == [2, 10, 4, 12, 17, 14, 3]
    assert labels.tolist() == [-100, -100, 11, -100, 13, 14, -100]
    assert ids.tolist() == [2, 10, 11, 12, 13, 14, 3]


# --- selection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_predictions", [None, 20])
def test_bert_counts_are_exact(max_predictions):
    spec = MaskedLMObjective(selection="bert", max_predictions=max_predictions)
    draw = generator()
    for length in [1, 2, 3, 4, 7, 10, 30, 50, 128, 130, 512]:
        special = specials(length, 0, length - 1) if length > 2 else specials(length)
        selected = select_targets(special, spec, draw)
        expected = min(max_predictions or 10**9, max(1, round(0.15 * length)))
        assert int(selected.sum()) == expected
        assert not (selected & special).any()


def test_roberta_counts_lie_between_floor_and_ceiling_with_the_right_mean():
    """Without special tokens the count is floor(.15 n + U(0,1)): 7 or 8 for n = 50, with mean 7.5."""
    spec = MaskedLMObjective(selection="roberta")
    draw, rows = generator(), 4000
    counts = torch.stack([select_targets(specials(50), spec, draw).sum() for _ in range(rows)])
    assert set(counts.tolist()) == {7, 8}
    assert abs(int((counts == 8).sum()) - rows / 2) < bounds(rows, 0.5)


@pytest.mark.parametrize("selection", ["roberta", "hf"])
def test_every_free_position_is_chosen_with_mask_prob(selection):
    spec, draw, rows = MaskedLMObjective(selection=selection), generator(), 6000
    special = specials(40, 0, 20, 39)
    total = torch.stack([select_targets(special, spec, draw) for _ in range(rows)]).sum(0)
    assert (total[special] == 0).all()
    assert ((total[~special] - 0.15 * rows).abs() < bounds(rows, 0.15)).all()


def test_bert_positions_are_uniform():
    spec, draw, rows = MaskedLMObjective(), generator(), 6000
    special = specials(42, 0, 41)  # 6 of 40 free positions
    total = torch.stack([select_targets(special, spec, draw) for _ in range(rows)]).sum(0)
    assert ((total[1:-1] - 0.15 * rows).abs() < bounds(rows, 0.15)).all()


def test_hf_counts_are_binomial():
    spec, draw, rows, n = MaskedLMObjective(selection="hf"), generator(), 4000, 60
    counts = torch.stack([select_targets(specials(n), spec, draw).sum() for _ in range(rows)]).double()
    variance = n * 0.15 * 0.85
    assert abs(float(counts.mean()) - n * 0.15) < 4 * math.sqrt(variance / rows)
    assert abs(float(counts.var()) - variance) < 4 * variance * math.sqrt(2 / rows)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_rows_always_have_a_target(selection, length):
    """Ledger F3: without the guard the loss of such a row is a mean over nothing."""
    spec, draw = MaskedLMObjective(selection=selection, mask_prob=0.01, whole_word=False), generator()
    hits = torch.zeros(length)
    for _ in range(600):
        selected = select_targets(specials(length), spec, draw)
        assert int(selected.sum()) >= 1
        hits += selected
    assert (hits > 600 / length * 0.7).all()  # the forced target is drawn uniformly
    nothing = select_targets(torch.ones(length, dtype=torch.bool), spec, draw)
    assert not nothing.any()


# --- n-grams --------------------------------------------------------------------------------------------------------


def test_ngram_lengths_follow_one_over_n():
    """6/11, 3/11, 2/11 for the first n-gram of a long row (nothing to overlap, budget never short)."""
    from hf_xformers.objectives import masked_lm

    seen = []
    original = masked_lm._fill_budget
    masked_lm._fill_budget = lambda order, sizes, *rest: seen.extend(sizes) or original(order, sizes, *rest)
    try:
        draw = generator()
        for _ in range(60):
            select_targets(specials(200), MaskedLMObjective(selection="ngram", whole_word=False), draw)
    finally:
        masked_lm._fill_budget = original
    for size, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert abs(seen.count(size) - share * len(seen)) < bounds(len(seen), share)
    assert set(seen) == {1, 2, 3}


def test_ngram_fill_golden():
    """Units of 2, 1, 3, 1, 1 tokens; unit 3 is special (not free)."""
    lengths, free = [2, 1, 3, 1, 1], [True, True, True, False, True]
    # In order: unit 1 with n=3 stops before the special unit (1 + 3 tokens); units (0, 1) overlap; unit 4 fits.
    assert _fill_budget([1, 0, 4], [3, 2, 1], lengths, free, 7) == [False, True, True, False, True]
    # One token less, and (0, 1) is shortened to unit 0 before the overlap is looked at, as in ALBERT.
    assert _fill_budget([1, 0, 4], [3, 2, 1], lengths, free, 6) == [True, True, True, False, False]
    # Budget 3: the n-gram (1, 2) would need 4 and is shortened to unit 1; unit 2 cannot fit at all; unit 0 can.
    assert _fill_budget([1, 2, 0, 4], [3, 1, 1, 1], lengths, free, 3) == [True, True, False, False, False]
    # Spent budget ends it.
    assert _fill_budget([4, 1], [1, 1], lengths, free, 1) == [False, False, False, False, True]


def test_ngram_budget_and_wholeness():
    spec, draw = MaskedLMObjective(selection="ngram"), generator(3)
    for _ in range(200):
        sizes = torch.randint(1, 5, (30,), generator=draw)
        units = torch.arange(30).repeat_interleave(sizes)
        units = torch.cat([torch.tensor([-1]), units, torch.tensor([-1])])
        selected = select_targets(specials(len(units)), spec, draw, units)
        budget = max(1, round(0.15 * len(units)))
        assert 1 <= int(selected.sum()) <= budget
        assert whole(selected, units)
    singles = torch.cat([torch.tensor([-1]), torch.arange(98), torch.tensor([-1])])
    counts = [int(select_targets(specials(100), spec, draw, singles).sum()) for _ in range(100)]
    assert set(counts) == {15}  # units of one token can always fill the budget


# --- whole words ----------------------------------------------------------------------------------------------------


def whole(selected, units):
    return (
        all(len(set(selected[units == unit].tolist())) == 1 for unit in set(units.tolist()) - {-1})
        and not selected[units < 0].any()
    )


def test_whole_word_golden(monkeypatch):
    """Units [-1,0,0,1,2,2,2,-1] with {0, 2} chosen -> targets at 1,2,4,5,6."""
    from hf_xformers.objectives import masked_lm

    def rule(objective, lengths, free, draw):
        assert lengths.tolist() == [1, 2, 1, 3, 1] and free.tolist() == [False, True, True, True, False]
        return torch.tensor([False, True, False, True, False])

    monkeypatch.setitem(masked_lm._RULES, "hf", rule)
    units = torch.tensor([-1, 0, 0, 1, 2, 2, 2, -1])
    selected = select_targets(specials(8), MaskedLMObjective(selection="hf"), generator(), units)
    assert selected.nonzero().squeeze(1).tolist() == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_units_of_one_token_reproduce_token_masking(selection):
    """Ledger oracle 4, exactly: the same generator gives the same noise."""
    spec = MaskedLMObjective(selection=selection, whole_word=False)
    vocabulary = torch.arange(100)
    for seed in range(20):
        special = specials(50, 0, 23, 24, 49)  # adjacent special tokens are not one unit
        units = torch.arange(50).masked_fill(special, -1)
        tokens = sample_noise(special, spec, vocabulary, generator(seed))
        words = sample_noise(special, spec, vocabulary, generator(seed), units)
        for name in ("selected", "action", "random_ids"):
            assert torch.equal(getattr(tokens, name), getattr(words, name))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_units_are_whole(selection):
    spec, draw = MaskedLMObjective(selection=selection), generator()
    units = torch.tensor([-1, 0, 0, 1, 2, 2, 2, 3, 4, 4, -1, 5, 6, 6, 7, 8, 9, 9, 10, -1])
    for _ in range(300):
        selected = select_targets(specials(20), spec, draw, units)
        assert whole(selected, units) and selected.any()


def test_expected_share_of_targets_does_not_depend_on_unit_length():
    spec, draw, rows = MaskedLMObjective(selection="hf"), generator(), 5000
    units = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3] + list(range(4, 30)))
    total = torch.stack([select_targets(specials(len(units)), spec, draw, units) for _ in range(rows)]).sum(0)
    assert ((total - 0.15 * rows).abs() < bounds(rows, 0.15)).all()


def test_bert_whole_words_stay_in_the_budget():
    spec, draw = MaskedLMObjective(whole_word=True), generator()
    units = torch.arange(20).repeat_interleave(torch.tensor([1, 2, 3, 9] * 5))  # 75 tokens, budget 11
    for _ in range(200):
        selected = select_targets(specials(75), spec, draw, units)
        assert 9 <= int(selected.sum()) <= 11 and whole(selected, units)
    one_word = torch.zeros(8, dtype=torch.int64)  # longer than the budget, but the row needs a target
    assert select_targets(specials(8), spec, draw, one_word).all()


def test_equal_ids_that_do_not_touch_are_two_units():
    """Word ids restart in the second text of a pair; the two words 0 are drawn apart."""
    units = torch.tensor([-1, 0, 0, -1, 0, 0, -1])
    spec, draw = MaskedLMObjective(selection="hf", mask_prob=0.5), generator()
    seen = {tuple(select_targets(specials(7), spec, draw, units).tolist()) for _ in range(100)}
    assert len(seen) == 3  # either or both; none is lifted to one by the guard


def test_a_special_token_splits_the_unit_around_it():
    """The mask of special tokens counts even where the unit ids do not say -1."""
    special, units = specials(5, 2), torch.zeros(5, dtype=torch.int64)
    spec, draw = MaskedLMObjective(selection="hf", mask_prob=0.5), generator()
    seen = {tuple(select_targets(special, spec, draw, units).int().tolist()) for _ in range(100)}
    assert seen == {(1, 1, 0, 0, 0), (0, 0, 0, 1, 1), (1, 1, 0, 1, 1)}


def test_word_unit_ids(bert_tokenizer):
    encoding = bert_tokenizer("w1 unbelievable playing", "w2 unbelievable")
    expected = [-1, 0, 1, 1, 1, 2, 2, -1, 3, 4, 4, 4, -1]
    assert word_unit_ids(encoding) == expected
    assert word_unit_ids(encoding.encodings[0]) == expected
    batch = bert_tokenizer(["playing", "w1 w2"])
    assert word_unit_ids(batch) == [[-1, 0, 0, -1], [-1, 0, 1, -1]]
    assert word_unit_ids(bert_tokenizer(["playing"])) == [[-1, 0, 0, -1]]
    assert word_unit_ids(bert_tokenizer("playing", return_tensors="pt")) == [[-1, 0, 0, -1]]
    with pytest.raises(ValueError, match="fast tokenizer"):
        word_unit_ids({"input_ids": [1, 2]})


# --- frequencies ----------------------------------------------------------------------------------------------------


def test_frequencies_over_a_million_tokens():
    """[MASK] .12, changed at random .015 (V-1)/V, selected but unchanged .015 + .015/V."""
    spec, draw, size, rows = MaskedLMObjective(selection="hf"), generator(), 50, 500
    vocabulary, length = torch.arange(10, 10 + size), 2000
    ids = vocabulary[torch.randint(size, (rows, length), generator=draw)]
    noises = [sample_noise(specials(length), spec, vocabulary, draw) for _ in range(rows)]
    noise = MaskNoise(*(torch.stack([getattr(n, f) for n in noises]) for f in ("selected", "action", "random_ids")))
    inputs, labels = apply_noise(ids, noise, mask_token_id=4)
    n = ids.numel()
    assert n == 1_000_000
    target = labels != -100
    shares = {
        "masked": (inputs == 4, 0.12),
        "changed": ((inputs != ids) & (inputs != 4), 0.015 * (size - 1) / size),
        "unchanged": (target & (inputs == ids), 0.015 + 0.015 / size),
        "target": (target, 0.15),
    }
    for name, (where, probability) in shares.items():
        assert abs(int(where.sum()) - probability * n) < bounds(n, probability), name
    # Labels are the original ids on M, inputs are the original ids off M.
    assert torch.equal(labels[target], ids[target])
    assert torch.equal(inputs[~target], ids[~target])
    # Random ids are uniform over the vocabulary: chi-square with 49 degrees of freedom, mean 49, deviation 9.9.
    drawn = torch.bincount(noise.random_ids.flatten() - 10, minlength=size).double()
    assert float(((drawn - n / size) ** 2 / (n / size)).sum()) < 49 + 4 * math.sqrt(2 * 49)


@pytest.mark.parametrize(
    ("mask", "rand", "actions"),
    [(1.0, 0.0, {MASK}), (0.0, 1.0, {RANDOM}), (0.0, 0.0, {KEEP}), (0.5, 0.5, {MASK, RANDOM})],
)
def test_replacement_shares_at_their_limits(mask, rand, actions):
    spec = MaskedLMObjective(mask_token_prob=mask, random_prob=rand)
    noise = sample_noise(specials(500), spec, torch.arange(9), generator())
    assert set(noise.action.tolist()) == actions


# --- collator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", SELECTIONS)
def test_collator_batch(bert_tokenizer, selection):
    collator = MaskedLMObjective(selection=selection).collator(bert_tokenizer, seed=1)
    texts = ["unbelievable w1 w2 w3 playing", "w4 w5 unbelievable", "w7"]
    encodings = [bert_tokenizer(text) for text in texts]
    rows = [
        {"input_ids": e["input_ids"], "word_ids": e.word_ids(), "token_type_ids": e["token_type_ids"]}
        for e in encodings
    ]
    batch = collator(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels", "token_type_ids"}
    plain = bert_tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])
    target = batch["labels"] != -100
    assert target.any(1).all()
    assert torch.equal(batch["labels"][target], plain["input_ids"][target])
    assert torch.equal(batch["input_ids"][~target], plain["input_ids"][~target])
    assert not target[torch.isin(plain["input_ids"], torch.tensor([0, 2, 3]))].any()


def test_word_ids_in_every_form(bert_tokenizer):
    """None, -1 and nan (what datasets makes of integers with nulls) all mean special."""
    collator = MaskedLMObjective(whole_word=True).collator(bert_tokenizer)
    ids = bert_tokenizer("unbelievable w1 playing")["input_ids"]
    forms = [
        {"word_ids": [None, 0, 0, 0, 1, 2, 2, None]},
        {"unit_ids": [-1, 0, 0, 0, 1, 2, 2, -1]},
        {"unit_ids": torch.tensor([-1, 0, 0, 0, 1, 2, 2, -1])},
        {"word_ids": np.array([np.nan, 0, 0, 0, 1, 2, 2, np.nan])},
    ]
    labels = [collator([{"input_ids": ids} | form])["labels"].tolist() for form in forms]
    assert labels.count(labels[0]) == 4


def test_missing_units_are_refused(bert_tokenizer):
    for spec in (MaskedLMObjective(whole_word=True), MaskedLMObjective(selection="ngram")):
        with pytest.raises(ValueError, match=r"'unit_ids' or 'word_ids'.*remove_unused_columns=False"):
            spec.collator(bert_tokenizer)([{"input_ids": [2, 5, 3]}])
    with pytest.raises(ValueError, match="'unit_ids' has 1 entries for 3"):
        MaskedLMObjective(whole_word=True).collator(bert_tokenizer)([{"input_ids": [2, 5, 3], "unit_ids": [0]}])


def test_tokenizer_without_mask_token_is_refused(gpt_tokenizer):
    with pytest.raises(ValueError, match="no mask token"):
        MaskedLMObjective().collator(gpt_tokenizer)


def test_random_vocabulary(bert_tokenizer):
    everything = sorted(bert_tokenizer.get_vocab().values())
    text = [index for index in everything if index >= 5]
    for selection, choice, expected in (
        ("bert", None, everything),
        ("hf", None, everything),
        ("ngram", None, everything),
        ("roberta", None, text),
        ("bert", "non_special", text),
        ("roberta", "all", everything),
    ):
        collator = MaskedLMObjective(selection=selection, random_vocab=choice).collator(bert_tokenizer)
        assert collator.vocabulary.tolist() == expected


def test_special_tokens_mask_of_the_feature_wins(bert_tokenizer):
    collator = MaskedLMObjective(mask_prob=0.99).collator(bert_tokenizer)
    row = {"input_ids": [5, 6, 7, 8], "special_tokens_mask": [1, 1, 0, 1]}
    assert (collator([row])["labels"] != -100).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_token_prob": 0.9, "random_prob": 0.2}, "must not exceed 1"),
        ({"selection": "hf", "max_predictions": 20}, "caps only"),
        ({"selection": "bert", "ngram_max": 2}, "ngram_max belongs"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskedLMObjective(**settings)


def test_choices_are_checked():
    with pytest.raises(TypeError, match=r"'random_vocab' expected one of \('all', 'non_special'\), got some"):
        MaskedLMObjective(random_vocab="some")
