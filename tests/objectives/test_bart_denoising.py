"""BART's denoising: golden vectors of the five noises, budgets, frequencies, batches, refusals."""

import math
import random

import pytest
import torch
from transformers.models.bart.modeling_bart import shift_tokens_right

from hf_xformers.objectives import build_objective
from hf_xformers.objectives.bart_denoising import (
    AS_MASK,
    BartDenoisingObjective,
    apply_noise,
    no_noise,
    permute_sentences,
    sample_noise,
    sentence_end_ids,
    span_lengths,
)

TEXT = torch.tensor([5, 6, 7, 8, 9])  # of the row [0, 5, 6, 7, 8, 9, 2]
VOCABULARY = torch.arange(100, 200)
ALL_OFF = {"mask_ratio": 0.0, "permute_sentences": 0.0}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def places(*indices, length=5):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(indices)] = True
    return mask


def row(noise, replace_length=1):
    return [0, *apply_noise(TEXT, noise, replace_length, 50).tolist(), 2]


def test_golden_vectors():
    """Places are of the text: one less than those of the row, which begins with 0."""
    noise = no_noise(5)
    assert row(noise) == [0, 5, 6, 7, 8, 9, 2]
    noise.head = places(1, 3)
    assert row(noise) == [0, 5, 50, 7, 50, 9, 2]
    assert row(noise, 0) == [0, 5, 7, 9, 2]
    noise.head, noise.tail = places(1), places(2)
    noise.inserted, noise.inserted_ids = torch.tensor([3]), torch.tensor([AS_MASK])
    assert row(noise) == [0, 5, 50, 8, 50, 9, 2]
    noise.inserted_ids = torch.tensor([33])
    noise.tails_as = torch.tensor([0, 0, 44, 0, 0])
    assert row(noise, -1) == [0, 5, 50, 44, 33, 8, 9, 2]
    noise = no_noise(5)
    noise.order = torch.tensor([3, 4, 0, 1, 2])
    assert row(noise) == [0, 8, 9, 5, 6, 7, 2]
    noise = no_noise(5)
    noise.rotation = 2
    assert row(noise) == [0, 7, 8, 9, 5, 6, 2]


def loop_infill(starts, heads, lengths, ids, mask):
    """Spans as the released code walks them: token by token, each word start using up a word of the length."""
    masked, gone = set(), set()
    for head, length in zip(heads, lengths):
        masked.add(head)
        left, at = length - 1, head + 1
        while at < len(ids):
            left -= int(starts[at])
            if left < 0:
                break
            gone.add(at)
            at += 1
    return [mask if at in masked else token for at, token in enumerate(ids) if at not in gone]


def test_spans_walk_whole_words():
    draw = random.Random(0)
    spec = BartDenoisingObjective(permute_sentences=0.0, random_ratio=0.0)
    for seed in range(60):
        length = draw.randint(1, 60)
        starts = torch.tensor([True] + [draw.random() < 0.6 for _ in range(length - 1)])
        none = torch.zeros(length, dtype=torch.bool)
        noise = sample_noise(starts, none, none, spec, VOCABULARY, generator(seed))
        again = generator(seed)
        words = int(starts.sum())
        budget = math.ceil(0.3 * words)
        lengths = span_lengths(budget, 3.5, again)
        assert int(lengths.sum()) == budget
        lengths = lengths[lengths > 0]
        chosen = starts.nonzero().squeeze(1)[torch.randperm(words, generator=again)[: len(lengths)]]
        ids = torch.arange(length) + 1000
        expected = loop_infill(starts, chosen.tolist(), lengths.tolist(), ids.tolist(), 50)
        found = apply_noise(ids, noise, 1, 50)
        own = torch.ones(len(found), dtype=torch.bool)
        own[noise.inserted] = False
        assert found[own].tolist() == expected and (found[~own] == 50).all()
        assert len(found) <= length


def test_frequencies():
    """Zero spans come with probability exp(-3.5); masks are random tokens in a tenth of the spans; half of the rows
    are rotated; deletion takes 30 % of the tokens."""
    draw = generator(1)
    lengths = torch.cat([span_lengths(200, 3.5, draw)[:-1] for _ in range(400)])  # the last one is cut
    share = math.exp(-3.5)
    bound = 4 * math.sqrt(len(lengths) * share * (1 - share))
    assert abs(int((lengths == 0).sum()) - share * len(lengths)) < bound
    assert abs(float(lengths.double().mean()) - 3.5) < 0.05
    flat = torch.ones(200, dtype=torch.bool)
    spec = BartDenoisingObjective(mask_length="subword", rotate_ratio=0.5, permute_sentences=0.0)
    noises = [sample_noise(flat, ~flat, ~flat, spec, VOCABULARY, draw) for _ in range(300)]
    assert {int(noise.head.sum()) for noise in noises} == {60} and not any(noise.tail.any() for noise in noises)
    randoms = sum(int((noise.heads_as[noise.head] != AS_MASK).sum()) for noise in noises)
    assert abs(randoms - 1800) < 4 * math.sqrt(18000 * 0.1 * 0.9)
    rotated = sum(noise.rotation > 0 for noise in noises)
    assert abs(rotated - 150) < 4 * math.sqrt(300 * 0.25) + 2
    assert len(apply_noise(torch.arange(200), noises[0], 0, 50)) == 140


def test_permutation_and_rotation_keep_the_tokens():
    seen = set()
    ends = places(1, 4, length=8)  # three sentences of 2, 3 and 3 tokens
    for seed in range(60):
        order = permute_sentences(ends, 1.0, generator(seed)).tolist()
        assert sorted(order) == list(range(8))
        blocks = [order[at] for at in range(8) if order[at] in (0, 2, 5)]
        for start, stop in ((0, 2), (2, 5), (5, 8)):  # sentences stay whole
            at = order.index(start)
            assert order[at : at + stop - start] == list(range(start, stop))
        seen.add(tuple(blocks))
    assert len(seen) == 6
    assert permute_sentences(ends, 0.0, generator()).tolist() == list(range(8))
    spec = BartDenoisingObjective(mask_ratio=0.0, rotate_ratio=1.0)
    found = apply_noise(TEXT, sample_noise(~places(), places(2), places(), spec, VOCABULARY, generator(3)), 1, 50)
    assert sorted(found.tolist()) == TEXT.tolist()


def test_batches(bert_tokenizer):
    rows = [{"input_ids": [2, *range(5, 25), 3], "word_ids": [-1, *range(20), -1]}]
    rows.append({"input_ids": [2, 45, 46, 47, 3, 9, 3], "word_ids": [-1, 0, 0, 0, -1, 1, -1]})
    collator = build_objective("bart_denoising").collator(bert_tokenizer)
    batch = collator(rows)
    assert batch["labels"][0].tolist() == rows[0]["input_ids"]
    shifted = shift_tokens_right(batch["labels"], 0, 3)
    assert torch.equal(batch["decoder_input_ids"], shifted) and shifted[0, :2].tolist() == [3, 2]
    for given, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"]):
        real = ids[mask.bool()].tolist()
        assert real[0] == 2 and real[-1] == 3 and len(real) <= len(given["input_ids"])
        assert 4 in real or set(real) != set(given["input_ids"])
    second = batch["input_ids"][1][batch["attention_mask"][1].bool()].tolist()
    assert second.count(3) == 2  # the separator stays
    same = build_objective({"type": "bart_denoising", **ALL_OFF}).collator(bert_tokenizer)(rows)
    assert torch.equal(same["input_ids"], same["labels"].where(same["labels"] >= 0, 0))
    alone = collator(rows[1:])
    assert alone["input_ids"][0, : len(second)].tolist() == second
    assert collator([{"input_ids": [2, 3], "word_ids": [-1, -1]}])["input_ids"].tolist() == [[2, 3]]


def test_full_stops():
    class Vocabulary:
        def get_vocab(self):
            return {".": 1, "Ġ.": 2, "▁.": 3, "##.": 4, "a.": 5, "...": 6}

    assert sentence_end_ids(Vocabulary()) == {1, 2, 3, 4}


def test_rows_never_outgrow_the_block(bert_tokenizer):
    spec = BartDenoisingObjective(insert_ratio=0.2, whole_word=False)
    raw = spec.raw_block_size(64)
    assert raw == 53
    collator = spec.collator(bert_tokenizer)
    for epoch in range(50):
        collator.set_epoch(epoch)
        assert collator([{"input_ids": [2, *([7] * (raw - 2)), 3]}])["input_ids"].shape[1] <= 64


def test_refusals():
    with pytest.raises(ValueError, match="set replace_length to 1 or 0"):
        BartDenoisingObjective(mask_length="subword", replace_length=-1)


def test_tokenizers_without_the_tokens_are_refused(t5_tokenizer, bert_tokenizer):
    with pytest.raises(ValueError, match="no mask token"):
        BartDenoisingObjective().collator(t5_tokenizer)
    with pytest.raises(ValueError, match="word_ids"):
        BartDenoisingObjective().collator(bert_tokenizer)([{"input_ids": [2, 5, 6, 3]}])
