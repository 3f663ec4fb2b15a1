# SPDX-License-Identifier: Apache-2.0
"""Segment reordering with masked tokens: the parts of a document are shuffled, and their order is predicted.

Source: Ding et al. 2021 (ERNIE-Doc, arXiv 2012.15688), section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Row, is_special, register
from .masked_lm import MaskedLMCollator, MaskedLMObjective

LABEL = "reordering_labels"


@dataclass
class OrderNoise:
    """Where a text is cut, and in which order its parts then stand: `bounds` [parts + 1], the first 0 and the last its
    length; `order` [parts], the number of the part at each place."""

    bounds: list[int]
    order: list[int]


def sample_noise(length: int, chunks: int, generator: torch.Generator) -> OrderNoise:
    """1 to `chunks` parts of a text of `length` tokens, none empty, in random order."""
    parts = int(torch.randint(1, max(min(chunks, length), 1) + 1, (), generator=generator))
    cuts = torch.randperm(max(length - 1, 0), generator=generator)[: parts - 1] + 1
    bounds = [0, *sorted(cuts.tolist()), length]
    return OrderNoise(bounds, torch.randperm(parts, generator=generator).tolist())


def apply_noise(values: Tensor, noise: OrderNoise) -> Tensor:
    """values [n] with the parts in their new order."""
    return torch.cat([values[noise.bounds[part] : noise.bounds[part + 1]] for part in noise.order])


def order_number(order: list[int]) -> int:
    """The class of an order of m parts: after the 1! + ... + (m - 1)! orders of fewer parts, in the order of the
    alphabet."""
    number = sum(factorial(parts) for parts in range(1, len(order)))
    for place, part in enumerate(order):
        smaller = sum(later < part for later in order[place + 1 :])
        number += smaller * factorial(len(order) - 1 - place)
    return number


class SegmentReorderingCollator(MaskedLMCollator):
    """Batches as for masked LM, of shuffled documents, with `reordering_labels` [B].

    Special tokens at the ends of a row stay there. Where words are masked as a whole, a part may begin inside a word.
    """

    objective: SegmentReorderingObjective

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        shuffled, numbers = [], []
        for row in rows:
            row, number = self.shuffled(row)
            shuffled.append(row)
            numbers.append(number)
        return super().collate(shuffled) | {LABEL: torch.tensor(numbers)}

    def shuffled(self, row: Row) -> tuple[Row, int]:
        """The row with the parts of its text in another order, and the number of that order."""
        text = (~is_special(row.ids, self.special)).nonzero().squeeze(1)
        if not len(text):
            return row, 0
        begin, end = int(text[0]), int(text[-1]) + 1
        noise = sample_noise(end - begin, self.objective.chunks, self.generator(row.ids))

        def moved(values: Tensor) -> Tensor:
            return torch.cat([values[:begin], apply_noise(values[begin:end], noise), values[end:]])

        # Positions and types are of places, not of tokens.
        columns = {
            name: value if name in ("position_ids", "token_type_ids") else moved(value)
            for name, value in row.columns.items()
        }
        return Row(moved(row.ids), columns, row.width), order_number(noise.order)


@register("segment_reordering")
class SegmentReorderingObjective(MaskedLMObjective):
    """Predict masked tokens of a document whose parts are shuffled, and in which of sum_i i! orders they stand.

    Args:
        chunks: most parts of a document, m; their number is drawn from 1 to m, and they are cut at random tokens.

    The other settings are those of masked LM.
    """

    chunks: int = bounded(3, least=1, most=6)

    summary: ClassVar[str] = "masked tokens, and the order of a document's shuffled parts (ERNIE-Doc)"
    corrupts: ClassVar[str] = "15 % of the tokens, and the order of up to 3 parts"
    head: ClassVar[str] = "SegmentReordering"
    collates = SegmentReorderingCollator
    preferred: ClassVar[bool] = False

    def config_fields(self) -> dict[str, Any]:
        return {"pretraining": {"reordering": {"chunks": self.chunks}}}
