"""Token-budget batches: every row once, never over the budget, little padding, the same for all processes."""

from collections import Counter

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from hf_xformers.data import LengthGroupedBatchSampler, token_budget_batches


def text_lengths(count=1000, seed=0):
    """Lengths like those of sentences: many short, few long; some empty."""
    return np.minimum(np.random.default_rng(seed).geometric(0.06, size=count) - 1, 120)


def cost(batch, lengths, multiple=1):
    longest = max(1, *(int(lengths[row]) for row in batch))
    return len(batch) * (-(-longest // multiple) * multiple)


def padding(batches, lengths):
    return 1 - lengths.sum() / sum(cost(batch, lengths) for batch in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8}, {"max_rows": 10}])
def test_every_row_once_and_within_the_budget(options, shuffle, world_size):
    for seed in range(5):
        lengths = text_lengths(200, seed)
        batches = token_budget_batches(lengths, 256, shuffle=shuffle, seed=seed, world_size=world_size, **options)
        assert sorted(row for batch in batches for row in batch) == list(range(200))
        assert all(cost(batch, lengths, options.get("pad_to_multiple_of", 1)) <= 256 for batch in batches)
        assert all(1 <= len(batch) <= options.get("max_rows", 200) for batch in batches)
        assert len(batches) % world_size == 0


def test_batches_of_one_process_are_full():
    """No batch has room for the row that follows it in order of length: a loop over sorted lengths, longest first."""
    lengths = np.maximum(text_lengths(), 1)
    batches = token_budget_batches(lengths, 500, shuffle=False)
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    expected, current = [], []
    for row in order:
        if current and lengths[current[0]] * (len(current) + 1) > 500:
            expected.append(current)
            current = []
        current.append(row)
    expected.append(current)
    assert [sorted(lengths[batch]) for batch in batches] == [sorted(lengths[batch]) for batch in expected[::-1]]


def test_little_padding_and_few_batches():
    lengths = text_lengths(10_000)
    grouped = token_budget_batches(lengths, 1024)
    order = np.random.default_rng(0).permutation(len(lengths))
    fixed = [
        order[i : i + 8].tolist() for i in range(0, len(lengths), 8)
    ]  # 8 rows of the longest text fill the budget
    assert padding(grouped, lengths) < 0.03 < 0.4 < padding(fixed, lengths)
    assert len(grouped) < len(fixed) / 5


def test_shuffling():
    lengths = text_lengths()
    plain = token_budget_batches(lengths, 300, shuffle=False)
    longest = [max(lengths[batch]) for batch in plain]
    assert longest == sorted(longest)
    first, again, other_seed, other_epoch = (
        token_budget_batches(lengths, 300, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert first == again
    assert first != other_seed != other_epoch != first
    # Not only the order of the batches is new: rows of equal length meet other rows.
    assert len({frozenset(batch) for batch in first} & {frozenset(batch) for batch in other_epoch}) < len(first) / 2
    spread = np.corrcoef(np.arange(len(first)), [max(lengths[batch]) for batch in first])[0, 1]
    assert abs(spread) < 4 / len(first) ** 0.5


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_rows_and_keep_step(world_size):
    lengths = text_lengths()
    samplers = [
        LengthGroupedBatchSampler(lengths, 512, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        assert {len(share) for share in shares} == {len(sampler) for sampler in samplers} == {len(samplers[0])}
        counts = Counter(row for share in shares for batch in share for row in batch)
        assert set(counts) == set(range(len(lengths))) and set(counts.values()) == {1}
        # In one step all processes have batches of about the same length, so none waits.
        spans = [np.ptp([max(lengths[batch]) for batch in step]) for step in zip(*shares, strict=True)]
        assert np.mean(spans) < 0.1 * lengths.max()


def test_fewer_rows_than_processes():
    batches = token_budget_batches([5, 6, 7], 10, world_size=4)
    assert len(batches) == 4
    assert {row for batch in batches for row in batch} == {0, 1, 2}
    assert len(token_budget_batches([1, 1, 1, 1], 10, world_size=4)) == 4  # divided, not repeated
    assert sorted(token_budget_batches([1, 1, 1, 1], 10, world_size=4)) == [[0], [1], [2], [3]]


def test_number_of_batches_is_that_of_every_epoch():
    sampler = LengthGroupedBatchSampler(text_lengths(), 200, world_size=3, rank=1)
    seen = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        seen.add(tuple(map(tuple, batches)))
    assert len(seen) == 4


def test_as_batch_sampler_of_a_loader():
    lengths = text_lengths(50)
    rows = [torch.full((int(length),), index) for index, length in enumerate(lengths)]

    def collate(batch):
        return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-1)

    sampler = LengthGroupedBatchSampler(lengths, 240)
    batches = list(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))
    assert len(batches) == len(sampler)
    assert all(batch.numel() <= 240 for batch in batches)
    assert sum((batch >= 0).sum().item() for batch in batches) == lengths.sum()


def test_accelerate_distributes_the_batches():
    lengths = text_lengths(300)
    everything = LengthGroupedBatchSampler(lengths, 256, world_size=2, seed=5)
    shards = [BatchSamplerShard(everything, 2, rank, even_batches=False) for rank in range(2)]
    own = [LengthGroupedBatchSampler(lengths, 256, world_size=2, seed=5, rank=rank) for rank in range(2)]
    for shard, mine in zip(shards, own, strict=True):
        shard.batch_sampler.sampler.set_epoch(2)  # the path by which Accelerate's loader reaches it
        mine.set_epoch(2)
        assert list(shard) == list(mine) and len(shard) == len(mine)


def test_no_rows():
    assert token_budget_batches([], 10) == []
    assert list(LengthGroupedBatchSampler([], 10)) == []


@pytest.mark.parametrize(
    "lengths, options, message",
    [
        ([3, 11], {}, "row 1 has 11 tokens .11 with padding., more than max_tokens=10; truncate .* at least 11"),
        ([3, 9], {"pad_to_multiple_of": 8}, "row 1 has 9 tokens .16 with padding."),
        ([3, -1], {}, "row 1 has the length -1"),
        ([3], {"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ([3], {"max_rows": 0}, "max_rows=0"),
        ([3], {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
        ([3], {"world_size": 0}, "world_size=0"),
    ],
)
def test_refusals(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        token_budget_batches(lengths, **{"max_tokens": 10, **options})
    with pytest.raises(ValueError, match=message):
        LengthGroupedBatchSampler(lengths, **{"max_tokens": 10, **options})


def test_rank_out_of_range():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank} is not a process of world_size=2; ranks are 0 to 1"):
            LengthGroupedBatchSampler([1], 10, rank=rank, world_size=2)
