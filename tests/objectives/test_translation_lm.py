"""Texts in several languages: the row of a pair, which tokens are chosen, and batches that depend on rows alone."""

import copy
import math

import pytest
import torch

from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.translation_lm import pair_row, sample_noise, shortened


def test_the_row_of_a_pair():
    """Four ends, positions that start again, a language for each token; swapped with the pair."""
    row = pair_row([5, 6], [7, 8, 9], 1)
    assert row["input_ids"] == [1, 5, 6, 1, 1, 7, 8, 9, 1]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3, 4] and row["langs"] == [0] * 4 + [1] * 5
    swapped = pair_row([7, 8, 9], [5, 6], 1)
    assert swapped["input_ids"] == row["input_ids"][4:] + row["input_ids"][:4]
    assert swapped["position_ids"] == row["position_ids"][4:] + row["position_ids"][:4]
    assert swapped["langs"] == [0] * 5 + [1] * 4
    assert pair_row([5, 6], [7], 1, reset=False)["position_ids"] == list(range(7))


@pytest.mark.parametrize("sizes, kept", [((3, 4), (3, 4)), ((3, 9), (3, 5)), ((9, 2), (6, 2)), ((9, 9), (4, 4))])
def test_long_pairs_lose_the_end_of_the_longer(sizes, kept):
    first, second = shortened(range(sizes[0]), range(sizes[1]), 8)
    assert (len(first), len(second)) == kept


def test_rare_tokens_are_chosen_more_often():
    """One of four tokens with counts 1, 4, 16, 64: with probability ~ 1, 1/2, 1/4, 1/8, within 4 deviations."""
    objective, draws = build_objective({"type": "tlm", "mask_prob": 0.2}), 4000
    free, counts = torch.tensor([False, True, True, True, True]), torch.tensor([9, 1, 4, 16, 64])
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(5)
    actions = torch.zeros(3)
    for _ in range(draws):
        noise = sample_noise(free, counts, objective, 50, generator)
        assert int(noise.selected.sum()) == 1  # ceil(.2 * 5)
        seen += noise.selected
        actions[noise.action[noise.selected].long()] += 1
    for share, wanted in zip((seen / draws).tolist(), (0, 8 / 15, 4 / 15, 2 / 15, 1 / 15)):
        assert abs(share - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / draws)
    for share, wanted in zip((actions / draws).tolist(), (0.1, 0.8, 0.1)):
        assert abs(share - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / draws)


def test_without_weights_every_token_stands_for_itself():
    objective = build_objective({"type": "tlm", "sample_alpha": 0})
    free = torch.ones(20_000, dtype=torch.bool)
    free[::10] = False
    noise = sample_noise(free, None, objective, 50, torch.Generator().manual_seed(1))
    count = int(free.sum())
    assert not noise.selected[~free].any()
    assert abs(int(noise.selected.sum()) - 0.15 * count) <= 4 * math.sqrt(0.15 * 0.85 * count)
    single = sample_noise(torch.tensor([False, True]), None, objective, 50, torch.Generator().manual_seed(2))
    assert single.selected.tolist() == [False, True]  # a row has a target


def features():
    pairs = [([20, 21, 22], [30, 31]), ([23], [32, 33, 34, 35]), ([24, 25], [36])]
    return [pair_row(*pair, 3) | {"token_counts": [1] * (sum(map(len, pair)) + 4)} for pair in pairs]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_does_not_depend_on_its_neighbours(bert_tokenizer, side):
    tokenizer = copy.deepcopy(bert_tokenizer)
    tokenizer.padding_side = side
    collator = build_objective("tlm").collator(tokenizer, seed=3)
    rows = features()
    together = collator(rows)
    for number, row in enumerate(rows):
        alone, size = collator([row]), len(row["input_ids"])
        part = slice(None, size) if side == "right" else slice(-size, None)
        for name, value in alone.items():
            assert torch.equal(value[0], together[name][number, part]), name
        assert (alone["labels"][0] != -100).sum() == math.ceil(0.15 * size)
        assert alone["labels"][0, 0] == -100 and alone["langs"].tolist() == [row["langs"]]
    assert together["attention_mask"].sum() == sum(len(row["input_ids"]) for row in rows)
    ends = together["input_ids"] == 3
    assert (together["labels"][ends] == -100).all()


def test_languages_are_those_of_the_config(bert_tokenizer):
    config = XFormerConfig(embedding={"type": "token", "languages": ("de", "fr", "en")}, vocab_size=50)
    bound = build_objective("tlm").bound_to(config)
    batch = bound.collator(bert_tokenizer)(features()[:1])
    assert batch["langs"].tolist() == [[2] * 5 + [0] * 4] and bound == build_objective("tlm")
    with pytest.raises(ValueError, match="language 'es' is unknown to the model's config, which has 'de', 'fr', 'en'"):
        build_objective({"type": "tlm", "languages": ("es", "de")}).bound_to(config)
    with pytest.raises(ValueError, match="must be two that differ"):
        build_objective({"type": "tlm", "languages": ("de", "de")})
    with pytest.raises(ValueError, match="'de' twice"):
        XFormerConfig(embedding={"type": "token", "languages": ("de", "de")})
    without = build_objective({"type": "tlm", "lang_embedding": False})
    assert "langs" not in without.collator(bert_tokenizer)(features())


def test_a_sentence_sees_its_translation(bert_tokenizer):
    """Positions that start again are no border here: the mask says so."""
    from hf_xformers.variants import family

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    config = XFormerConfig(embedding={"type": "token", "languages": ("en", "de")}, vocab_size=50, **shape)
    model = family("xformer")["ForMaskedLM"](config).eval()
    batch = build_objective("tlm").collator(bert_tokenizer, static=True)(features()[:1])
    logits = model(**batch).logits
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, -2] = 40
    assert not torch.allclose(logits[0, :5], model(**other).logits[0, :5])
    spoken = model(**{**batch, "langs": 1 - batch["langs"]}).logits
    assert not torch.allclose(logits, spoken)


def test_no_mask_token_is_refused(gpt_tokenizer):
    with pytest.raises(ValueError, match="add_missing=\\['mask'\\]"):
        build_objective("tlm").collator(gpt_tokenizer)
