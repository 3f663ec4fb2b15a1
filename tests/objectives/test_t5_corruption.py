"""T5's other corruptions: golden vectors, round trips, frequencies, lengths, sentinels."""

import math

import pytest
import torch

from hf_xformers.objectives import build_objective
from hf_xformers.objectives.t5_corruption import CorruptionNoise, T5CorruptionObjective, apply_noise, sample_noise

IDS = torch.arange(10, 18)
SENTINELS = torch.arange(99, 89, -1)
ORDER = torch.tensor([7, 0, 1, 2, 6, 5, 4, 3])
CORRUPTIONS = ["prefix_lm", "bert_style", "mass_style", "iid_denoise", "drop_tokens", "deshuffle"]
VOCABULARY = torch.arange(10, 60)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("corruption", "inputs", "targets"),
    [
        ("iid_denoise", [10, 99, 13, 98, 15, 97, 1], [99, 11, 12, 98, 14, 97, 16, 17, 1]),
        ("drop_tokens", [10, 13, 15, 1], [11, 12, 14, 16, 17, 1]),
        ("mass_style", [10, 99, 99, 13, 99, 15, 99, 99, 1], [*range(10, 18), 1]),
        ("bert_style", [10, 55, 99, 13, 99, 15, 99, 99, 1], [*range(10, 18), 1]),
        ("prefix_lm", [10, 13, 15, 1], [11, 12, 14, 16, 17, 1]),
        ("deshuffle", [17, 10, 11, 12, 16, 15, 14, 13, 1], [*range(10, 18), 1]),
    ],
)
def test_golden_vectors(corruption, inputs, targets):
    random_ids = torch.full((8,), -1)
    if corruption == "bert_style":
        random_ids[1], random_ids[0] = 55, 44  # the second is of a token that is no noise
    order = ORDER if corruption == "deshuffle" else torch.arange(8)
    noise = CorruptionNoise(torch.tensor([0, 1, 1, 0, 1, 0, 1, 1]).bool(), random_ids, order)
    found = apply_noise(IDS, noise, corruption, SENTINELS, 1)
    assert (found[0].tolist(), found[1].tolist()) == (inputs, targets)


def test_frequencies():
    draw, rows, n = generator(), 400, 100
    share = 0.15
    for corruption in ("iid_denoise", "drop_tokens", "mass_style", "bert_style"):
        spec = T5CorruptionObjective(corruption=corruption)
        noises = [sample_noise(n, spec, VOCABULARY, 100, draw) for _ in range(rows)]
        total = sum(int(noise.noise.sum()) for noise in noises)
        assert abs(total - share * rows * n) < 4 * math.sqrt(rows * n * share * (1 - share))
        randoms = sum(int((noise.random_ids >= 0)[noise.noise].sum()) for noise in noises)
        wanted = 0.1 * total if corruption == "bert_style" else 0
        assert abs(randoms - wanted) <= 4 * math.sqrt(0.09 * total) * (wanted > 0)
    spec = T5CorruptionObjective(corruption="prefix_lm")
    noises = [sample_noise(9, spec, VOCABULARY, 0, draw).noise for _ in range(2000)]
    prefixes = torch.tensor([int((~noise).sum()) for noise in noises]).bincount(minlength=9)
    assert prefixes[0] == 0 and ((prefixes[1:] - 250).abs() < 4 * math.sqrt(250)).all() and len(prefixes) == 9
    assert all(not noise[: int((~noise).sum())].any() for noise in noises[:50])
    orders = {
        tuple(sample_noise(3, T5CorruptionObjective(corruption="deshuffle"), VOCABULARY, 0, draw).order.tolist())
        for _ in range(100)
    }
    assert len(orders) == 6


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_batches(t5_tokenizer, corruption):
    """The text comes back from inputs and targets, rows of any length work, and none is longer than its block."""
    spec = T5CorruptionObjective(corruption=corruption)
    collator = spec.collator(t5_tokenizer)
    raw = spec.raw_block_size(40)
    rows = [list(range(3, 3 + raw)), [5, 6, 7, 8], [9], []]
    for epoch in range(8):
        collator.set_epoch(epoch)
        batch = collator([{"input_ids": [*row, 1]} for row in rows])
        assert batch["input_ids"].shape[1] <= 40 and batch["labels"].shape[1] <= spec.target_length(40)
        assert (batch["decoder_input_ids"][:, 0] == 0).all()
        for row, ids, mask, labels in zip(rows, batch["input_ids"], batch["attention_mask"], batch["labels"]):
            inputs, targets = ids[mask.bool()].tolist(), labels[labels != -100].tolist()
            assert inputs.pop() == targets.pop() == 1
            if corruption in ("bert_style", "mass_style", "deshuffle"):
                assert targets == row and len(inputs) == len(row)
                if corruption == "deshuffle":
                    assert sorted(inputs) == row
            elif corruption == "prefix_lm":
                assert inputs + targets == row and (len(row) < 2 or (inputs and targets))
            else:
                first = len(t5_tokenizer) - 10
                assert sorted(token for token in inputs + targets if token < first) == row


def test_sentinels_suffice(t5_tokenizer):
    """Ten sentinels name ten runs of text around nine of noise; what would be further noise stays text."""
    spec = T5CorruptionObjective(noise_density=0.5)
    batch = spec.collator(t5_tokenizer)([{"input_ids": [5] * 60}])
    sentinels = batch["input_ids"][0] >= len(t5_tokenizer) - 10
    assert int(sentinels.sum()) == 9
    with pytest.raises(ValueError, match="about 13 runs of noise for 10 sentinels"):
        T5CorruptionObjective(max_sentinels=10).raw_block_size(100)


def test_refusals(bert_tokenizer, gpt_tokenizer):
    with pytest.raises(ValueError, match="no eos token"):
        T5CorruptionObjective(corruption="deshuffle").collator(bert_tokenizer)
    with pytest.raises(ValueError, match="no <extra_id_0>"):
        T5CorruptionObjective(corruption="mass_style").collator(gpt_tokenizer)
    T5CorruptionObjective(corruption="deshuffle").collator(gpt_tokenizer)
    assert build_objective({"type": "t5_corruption", "corruption": "drop_tokens"}).num_sentinels == 0
