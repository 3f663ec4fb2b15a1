"""T5 span corruption: golden vector, exact counts, round trip, uniform compositions, lengths without padding."""

import itertools
import math

import pytest
import torch

from hf_xformers.objectives import SpanCorruptionObjective
from hf_xformers.objectives.seq2seq import shift_right
from hf_xformers.objectives.span_corruption import apply_noise, noise_counts, sample_noise, sentinel_ids

SENTINELS = torch.arange(99_999, 99_000, -1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def restore(inputs, targets, sentinels, eos):
    """Put each span of the targets where its sentinel stands in the inputs; plain Python."""
    order = {int(s): i for i, s in enumerate(sentinels)}
    assert inputs[-1] == eos and targets[-1] == eos
    spans, text = {}, []
    for token in targets[:-1]:
        if token in order:
            assert order[token] == len(spans)
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    for token in inputs[:-1]:
        text += spans[token] if token in order else [token]
    return text


def test_golden_vector():
    ids = torch.arange(10, 22)
    noise = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1]).bool()
    inputs, targets = apply_noise(ids, noise, torch.arange(99, 89, -1), 1)
    assert inputs.tolist() == [10, 11, 99, 14, 15, 16, 98, 18, 19, 97, 1]
    assert targets.tolist() == [99, 12, 13, 98, 17, 97, 20, 21, 1]


def test_counts_round_trip_and_lengths():
    """q and s are exact for n in 2..2000, rows start with text and end with noise, the text can be restored."""
    draw = generator()
    for n in list(range(2, 120)) + list(range(120, 2001, 47)) + [2000]:
        noise = sample_noise(n, 0.15, 3.0, draw)
        q = min(max(round(n * 0.15), 1), n - 1)
        s = max(1, round(q / 3))
        assert noise_counts(n, 0.15, 3.0) == (q, s)
        assert len(noise) == n and int(noise.sum()) == q
        assert not noise[0] and noise[-1]
        assert int((noise[1:] & ~noise[:-1]).sum()) == s
        ids = torch.randint(0, 1000, (n,), generator=draw)
        inputs, targets = apply_noise(ids, noise, SENTINELS, 1_000_000)
        assert len(inputs) + len(targets) == n + 2 * s + 2
        assert restore(inputs.tolist(), targets.tolist(), SENTINELS, 1_000_000) == ids.tolist()


def test_one_token_and_none():
    for n, expected in ((1, ([7, 1], [99, 1])), (2, ([7, 99, 1], [99, 7, 1])), (0, ([1], [1]))):
        noise = sample_noise(n, 0.15, 3.0, generator())
        inputs, targets = apply_noise(torch.full((n,), 7), noise, torch.arange(99, 89, -1), 1)
        assert (inputs.tolist(), targets.tolist()) == expected


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("mean", [1.0, 3.0, 10.0])
def test_any_density_and_span_length(density, mean):
    draw = generator()
    for n in range(2, 60):
        noise = sample_noise(n, density, mean, draw)
        q, s = noise_counts(n, density, mean)
        assert int(noise.sum()) == q and 1 <= s <= min(q, n - q)
        assert int((noise[1:] & ~noise[:-1]).sum()) == s and not noise[0] and noise[-1]


def test_all_masks_are_equally_likely():
    """n = 8, density .5, mean 2: two parts of 4 text and of 4 noise tokens, 3 x 3 masks. Chi-square, 8 degrees."""
    draw, rows = generator(), 9000
    possible = {
        tuple([False] * a + [True] * b + [False] * (4 - a) + [True] * (4 - b))
        for a, b in itertools.product((1, 2, 3), repeat=2)
    }
    counts = dict.fromkeys(possible, 0)
    for _ in range(rows):
        counts[tuple(sample_noise(8, 0.5, 2.0, draw).tolist())] += 1  # a KeyError would be an impossible mask
    statistic = sum((count - rows / 9) ** 2 / (rows / 9) for count in counts.values())
    assert statistic < 8 + 4 * math.sqrt(2 * 8)


def test_mean_span_length_and_density():
    """512-token blocks: every row has 85 noise tokens of 568 in 28 spans."""
    noise = torch.stack([sample_noise(568, 0.15, 3.0, generator(i)) for i in range(50)])
    assert (noise.sum(1) == 85).all()
    assert ((noise[:, 1:] & ~noise[:, :-1]).sum(1) == 28).all()
    # Each position is noise about as often, apart from the two ends.
    inner = noise[:, 50:-50].double().mean()
    assert abs(float(inner) - 85 / 568) < 0.02


@pytest.mark.parametrize(
    ("block", "raw", "target"), [(128, 141, 29), (256, 284, 58), (512, 568, 114), (1024, 1137, 229)]
)
def test_lengths_without_padding(block, raw, target):
    spec = SpanCorruptionObjective()
    assert (spec.raw_block_size(block), spec.target_length(block)) == (raw, target)
    noise = sample_noise(raw, 0.15, 3.0, generator())
    inputs, targets = apply_noise(torch.zeros(raw, dtype=torch.int64), noise, SENTINELS, 1)
    assert (len(inputs), len(targets)) == (block, target)


@pytest.mark.parametrize("density", [0.05, 0.15, 0.5, 0.8])
def test_block_size_is_met_and_maximal(density):
    spec = SpanCorruptionObjective(noise_density=density, num_sentinels=10_000)
    for block in range(3, 200):
        raw = spec.raw_block_size(block)
        assert spec._lengths(raw)[0] == block or (density > 0.5 and spec._lengths(raw)[0] == block - 1)
        assert spec._lengths(raw + 1)[0] > block
        assert spec.target_length(block) == spec._lengths(raw)[1]
    with pytest.raises(ValueError, match="at least 3"):
        spec.raw_block_size(2)


def test_sentinels(t5_tokenizer, bert_tokenizer):
    vocabulary = t5_tokenizer.get_vocab()
    size = len(t5_tokenizer)
    assert vocabulary["<extra_id_0>"] == size - 1 and vocabulary["<extra_id_9>"] == size - 10
    assert sentinel_ids(t5_tokenizer, None, 100).tolist() == list(range(size - 1, size - 11, -1))
    assert sentinel_ids(t5_tokenizer, None, 4).tolist() == list(range(size - 1, size - 5, -1))
    assert sentinel_ids(bert_tokenizer, 40, 3).tolist() == [40, 39, 38]
    with pytest.raises(ValueError, match=f"no <extra_id_0>.*sentinel_start={len(bert_tokenizer) - 1}"):
        sentinel_ids(bert_tokenizer, None, 100)
    for start, count in ((len(bert_tokenizer), 5), (3, 5)):
        with pytest.raises(ValueError, match="the vocabulary has 0"):
            sentinel_ids(bert_tokenizer, start, count)


def test_too_many_spans_are_refused(t5_tokenizer):
    """Ten sentinels serve rows up to about 220 tokens."""
    collator = SpanCorruptionObjective().collator(t5_tokenizer)
    with pytest.raises(ValueError, match=r"\d+ noise spans for 10 sentinels"):
        collator([{"input_ids": [5] * 400}])
    with pytest.raises(ValueError, match="with block_size=2000 the row has"):
        SpanCorruptionObjective().raw_block_size(2000)


def test_shift_right():
    labels = torch.tensor([[9, 8, 1], [7, 1, -100]])
    assert shift_right(labels, 0).tolist() == [[0, 9, 8], [0, 7, 1]]


def test_collator_batch(t5_tokenizer):
    collator = SpanCorruptionObjective().collator(t5_tokenizer, pad_to_multiple_of=8)
    rows = [list(range(3, 40)), list(range(5, 25)), [6]]
    batch = collator([{"input_ids": row} for row in rows])
    assert set(batch) == {"input_ids", "attention_mask", "labels", "decoder_input_ids"}
    assert batch["input_ids"].shape[1] % 8 == 0 and batch["labels"].shape[1] % 8 == 0
    for index, row in enumerate(rows):
        real = batch["attention_mask"][index].bool()
        inputs, labels = batch["input_ids"][index], batch["labels"][index]
        assert (inputs[~real] == 0).all() and inputs[real][-1] == 1
        targets = labels[labels != -100].tolist()
        assert (labels[len(targets) :] == -100).all()
        if len(row) > 1:
            assert restore(inputs[real].tolist(), targets, collator.sentinels, 1) == row
        assert batch["decoder_input_ids"][index].tolist()[: len(targets) + 1] == [0, *targets][: labels.numel()]
    assert (batch["decoder_input_ids"] >= 0).all()


def test_special_tokens_are_taken_out(t5_tokenizer):
    """eos at the end, padding and bos-like tokens do not become noise or text; unknown tokens are text."""
    collator = SpanCorruptionObjective().collator(t5_tokenizer)
    text = [5, 6, 2, 8, 9, 10, 11]
    plain = collator([{"input_ids": text}])
    for feature in (
        {"input_ids": [*text, 1]},
        {"input_ids": [*text, 1, 0, 0], "attention_mask": [1] * 8 + [0, 0]},
        {"input_ids": [30, *text], "special_tokens_mask": [1] + [0] * 7},
    ):
        batch = collator([feature])
        assert all(torch.equal(batch[name], plain[name]) for name in plain)


def test_left_padding_only_for_the_encoder(t5_tokenizer):
    import copy

    left = copy.deepcopy(t5_tokenizer)
    left.padding_side = "left"
    batch = SpanCorruptionObjective().collator(left)([{"input_ids": list(range(3, 30))}, {"input_ids": [5, 6, 7]}])
    assert batch["attention_mask"][1, 0] == 0 and batch["attention_mask"][1, -1] == 1
    assert batch["labels"][1, 0] >= 0 and batch["labels"][1, -1] == -100


def test_missing_tokens_are_refused(bert_tokenizer):
    with pytest.raises(ValueError, match="no eos token"):
        SpanCorruptionObjective(sentinel_start=40).collator(bert_tokenizer)
