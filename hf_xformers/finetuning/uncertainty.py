# SPDX-License-Identifier: Apache-2.0
"""Sampling of several tasks by uncertainty (Pilault, Elhattami, Pal 2021, arXiv 2009.09139, section 2.3, algorithm
1): of candidates of all tasks those are trained on whose answers the model knows least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CANDIDATES = "candidates"  # of a batch: a batch of each task, by name
UNCERTAINTY = "uncertainty"


class CandidateSampler:
    """Steps of candidates: `batch_size` rows of every task, or all of a task that has fewer; other ones in every
    epoch. A task begins again, in another order, when its rows were all there. An epoch has as many steps as all rows
    together make batches. Call `set_epoch` before each epoch; Trainer does."""

    def __init__(self, sizes: Sequence[int], batch_size: int, seed: int = 0) -> None:
        self.sizes, self.rows, self.seed, self.epoch = list(sizes), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def sampler(self) -> CandidateSampler:
        """Itself: where Accelerate looks for `set_epoch` once it has wrapped the batch sampler."""
        return self

    def __len__(self) -> int:
        return sum(-(-size // self.rows) for size in self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        starts = [sum(self.sizes[:place]) for place in range(len(self.sizes))]
        streams = [
            self._rows(start, size, torch.Generator().manual_seed(self.seed + 1000003 * self.epoch + 7919 * place))
            for place, (start, size) in enumerate(zip(starts, self.sizes))
        ]
        for _ in range(len(self)):
            yield [row for stream in streams for row in next(stream)]

    def _rows(self, start: int, size: int, draw: torch.Generator) -> Iterator[list[int]]:
        count = min(self.rows, size)
        while True:
            order = [start + index for index in torch.randperm(size, generator=draw).tolist()]
            for place in range(0, size - size % count, count):
                yield order[place : place + count]


def uncertainty(head: str, outputs: Mapping[str, Any], batch: Mapping[str, Any], *, several: bool = False) -> Tensor:
    """[B]: the entropy of what is predicted of each row by the highest that it could have, in [0, 1].

    head: as in For<head>. several: labels are true or false one by one. Of a text's words it is the mean over those
    that have labels; of a span that of its two ends over the real tokens. (Algorithm 1 divides by the highest mean of
    all tasks as well, which leaves the order alone.)
    """
    if head == "QuestionAnswering":
        mask = batch.get("attention_mask")
        ends = [outputs["start_logits"], outputs["end_logits"]]
        return torch.stack([_of_choice(end, mask) for end in ends]).mean(0)
    logits = outputs["logits"]
    if several:
        return _of_choice(torch.stack([logits, torch.zeros_like(logits)], dim=-1)).mean(-1)
    found = _of_choice(logits)
    if head == "TokenClassification":
        known = (batch["labels"] != -100).to(found.dtype)
        return (found * known).sum(-1) / known.sum(-1).clamp(min=1)
    return found


def _of_choice(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """[..., C] -> [...]: the entropy of softmax over log C. mask [..., C]: 1 for what can be chosen."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    count = torch.full(wide.shape[:-1], wide.shape[-1], dtype=wide.dtype, device=wide.device)
    if mask is not None:
        wide = wide.masked_fill(mask == 0, torch.finfo(wide.dtype).min)
        count = mask.sum(-1).to(wide.dtype)
    entropy = torch.special.entr(wide.softmax(-1)).sum(-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)


def most_uncertain(uncertainties: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The rows [n] of each task, in their order, that are among the `count` of all tasks with the highest uncertainty
    [B]; of equal ones the first. Tasks without any are left out."""
    names = list(uncertainties)
    every = torch.cat([uncertainties[name].float() for name in names])
    chosen = torch.zeros_like(every, dtype=torch.bool)
    chosen[every.argsort(descending=True, stable=True)[:count]] = True
    parts = chosen.split([len(uncertainties[name]) for name in names])
    return {name: part.nonzero().flatten() for name, part in zip(names, parts) if bool(part.any())}


def rows_of(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some rows of a batch, whose tensors all lead with the batch."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
