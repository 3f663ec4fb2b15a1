# SPDX-License-Identifier: Apache-2.0
"""Batches without waste for texts of different lengths: similar lengths together, up to a budget of tokens.

A batch costs rows x longest row, padding included. With a fixed number of rows, short texts fill only a part of the
memory that the longest batch needs, and mixed lengths are padded to the longest; a budget over sorted lengths avoids
both (the batches of Vaswani et al. 2017, section 5.1, are of this kind).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def token_budget_batches(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    max_rows: int | None = None,
    pad_to_multiple_of: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    world_size: int = 1,
) -> list[list[int]]:
    """Divides rows into batches whose padded size is at most `max_tokens`; every row is in exactly one batch.

    Args:
        lengths: tokens of each row.
        max_tokens: budget of a batch: number of rows times the length of its longest row, rounded up to
            `pad_to_multiple_of`.
        max_rows: limit of rows next to the budget.
        pad_to_multiple_of: what the collator rounds lengths up to.
        shuffle: random order of the batches, and random choice among rows of equal (rounded) length. Otherwise the
            shortest rows come first.
        seed, epoch: choose the random order; the same numbers give the same batches everywhere.
        world_size: number of processes. The number of batches becomes a multiple of it (by dividing the batches with
            most rows; batches are repeated only when all hold a single row), and each run of `world_size` batches,
            which are trained on at the same time, holds similar lengths, so that no process waits for another.

    Returns:
        Row numbers of every batch. Process r of w takes batches r, r + w, r + 2w, ...

    Raises:
        ValueError: a row that is longer than the budget, a negative length, or a setting below 1.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    _check(sizes, max_tokens, max_rows, pad_to_multiple_of, world_size)
    if len(sizes) == 0:
        return []
    # An empty row is padded to one token, since a batch has at least one column.
    padded = -(-np.maximum(sizes, 1) // pad_to_multiple_of) * pad_to_multiple_of
    longest = int(padded.max())
    if longest > max_tokens:
        row = int(padded.argmax())
        raise ValueError(
            f"row {row} has {int(sizes[row])} tokens ({longest} with padding), more than max_tokens={max_tokens}; "
            f"truncate the texts, or take max_tokens of at least {longest}"
        )
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(sizes)) if shuffle else np.arange(len(sizes))
    order = order[np.argsort(padded[order], kind="stable")]

    batches = _fill(order, padded, max_tokens, max_rows or len(sizes))
    batches = _make_divisible(batches, world_size)
    steps = [batches[i : i + world_size] for i in range(0, len(batches), world_size)]
    if shuffle:
        steps = [steps[i] for i in random.permutation(len(steps))]
    return [batch.tolist() for step in steps for batch in step]


def _fill(order: np.ndarray, padded: np.ndarray, max_tokens: int, max_rows: int) -> list[np.ndarray]:
    """Consecutive runs of `order` (ascending lengths), from the longest row down, each as long as the budget allows.

    The longest row of a run then is its last, so the size of a run follows from one division; one step per batch.
    """
    batches = []
    stop = len(order)
    while stop > 0:
        rows = min(max_tokens // int(padded[order[stop - 1]]), max_rows, stop)
        batches.append(order[stop - rows : stop])
        stop -= rows
    return batches[::-1]


def _make_divisible(batches: list[np.ndarray], world_size: int) -> list[np.ndarray]:
    while len(batches) % world_size:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]))
        rows = batches[largest]
        if len(rows) > 1:
            batches[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        else:  # single rows only: every process must take a step all the same
            batches.append(batches[-1])
    return batches


def _check(sizes: np.ndarray, max_tokens: int, max_rows: int | None, pad_to_multiple_of: int, world_size: int) -> None:
    settings = {
        "max_tokens": max_tokens,
        "max_rows": 1 if max_rows is None else max_rows,
        "pad_to_multiple_of": pad_to_multiple_of,
        "world_size": world_size,
    }
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if len(sizes) and sizes.min() < 0:
        raise ValueError(
            f"row {int(sizes.argmin())} has the length {int(sizes.min())}; lengths count tokens, from 0 up"
        )


class LengthGroupedBatchSampler:
    """`batch_sampler` of a `torch.utils.data.DataLoader` over `token_budget_batches`, new batches in every epoch.

    Args:
        lengths, max_tokens, max_rows, pad_to_multiple_of, shuffle, seed: as in `token_budget_batches`.
        rank: number of this process. None yields the batches of all processes step by step, for a library that
            distributes batches itself: Accelerate does so with `even_batches=False` (the number of batches is a
            multiple of `world_size` already).
        world_size: number of processes.

    Call `set_epoch` before each epoch; Accelerate and `Trainer` do so themselves.

    Raises:
        ValueError: as `token_budget_batches`, or a `rank` outside 0 .. world_size - 1.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        max_rows: int | None = None,
        pad_to_multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int = 1,
    ):
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(
                f"rank={rank} is not a process of world_size={world_size}; ranks are 0 to {world_size - 1}"
            )
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.pad_to_multiple_of = pad_to_multiple_of
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        # Sizes of batches follow from the sorted lengths alone, so their number is the same in every epoch.
        self._length = len(self._batches())

    def _batches(self) -> list[list[int]]:
        batches = token_budget_batches(
            self.lengths,
            self.max_tokens,
            max_rows=self.max_rows,
            pad_to_multiple_of=self.pad_to_multiple_of,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
            world_size=self.world_size,
        )
        return batches if self.rank is None else batches[self.rank :: self.world_size]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the random order of the next pass; the same in every process."""
        self.epoch = epoch

    @property
    def sampler(self) -> LengthGroupedBatchSampler:
        """Itself: where Accelerate looks for `set_epoch` once it has wrapped the batch sampler."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return self._length
