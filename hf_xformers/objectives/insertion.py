# SPDX-License-Identifier: Apache-2.0
"""Words in an order other than the text's, each inserted at its place (Gu, Liu and Cho 2019, arXiv 1902.01370)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, Collator, Objective, Row, pad_rows, register, round_up

Order = Literal[
    "left_to_right", "right_to_left", "odd_even", "tree", "common_first", "rare_first", "random", "searched"
]


def generation_order(kind: Order, ids: Tensor, generator: torch.Generator) -> Tensor:
    """ids [n] -> [n]: which word comes first, second, ... (section 4.1). `searched` is the text's own order: the model
    decides."""
    count = len(ids)
    if kind == "random":
        return torch.randperm(count, generator=generator)
    if kind == "right_to_left":
        return torch.arange(count).flip(0)
    if kind == "odd_even":
        return torch.cat((torch.arange(count)[::2], torch.arange(count)[1::2]))
    if kind == "tree":
        return balanced_tree(count)
    if kind in ("common_first", "rare_first"):
        return torch.sort(ids, stable=True, descending=kind == "rare_first").indices
    return torch.arange(count)


def balanced_tree(count: int) -> Tensor:
    """[count]: the word in the middle, then those in the middle of either half, and so on, level by level."""
    order: list[int] = []
    level = [(0, count)]
    while level:
        halves = []
        for begin, end in level:
            if begin < end:
                middle = (begin + end) // 2
                order.append(middle)
                halves += [(begin, middle), (middle + 1, end)]
        level = halves
    return torch.tensor(order, dtype=torch.long)


class InsertionCollator(Collator):
    """`input_ids`, `attention_mask`, `insertion_positions` and `labels` [B, T].

    A row is the left boundary, the right boundary, the words in the order of their generation, and the token that ends
    the generation, which has no place (-1, as padding has). The boundaries are given, all else is a target.
    `order_beam` [B], with searched orders: how many the model keeps while it looks for them.
    """

    objective: InsertionObjective

    def __init__(self, objective: InsertionObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        self.begin, self.end = boundaries(tokenizer)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        kind, made = self.objective.order, []
        for row in rows:
            words = row.ids
            if len(words) and words[0] == self.begin:
                words = words[1:]
            if len(words) and words[-1] == self.end:
                words = words[:-1]
            order = generation_order(kind, words, self.generator(row.ids))
            ids = torch.cat((torch.tensor([self.begin, self.end]), words[order], torch.tensor([self.end])))
            places = torch.cat((torch.tensor([0, len(words) + 1]), order + 1, torch.tensor([-1])))
            made.append((ids, places, torch.cat((torch.full((2,), IGNORE_INDEX), ids[2:]))))
        width, side = round_up(max(len(ids) for ids, *_ in made), self.pad_to_multiple_of), self.padding_side
        batch = {
            "input_ids": pad_rows([ids for ids, *_ in made], self.pad_token_id, width, side),
            "attention_mask": pad_rows([torch.ones_like(ids) for ids, *_ in made], 0, width, side),
            "insertion_positions": pad_rows([places for _, places, _ in made], -1, width, side),
            "labels": pad_rows([labels for *_, labels in made], IGNORE_INDEX, width, side),
        }
        if kind == "searched":
            batch["order_beam"] = torch.full((len(rows),), self.objective.beam)
        return batch


def boundaries(tokenizer: Any) -> tuple[int, int]:
    """The tokens that stand left and right of a text; the right one also ends its generation."""
    begin = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokens to bound a text on the left and on the right: add a bos (or"
            " cls) and an eos (or sep) token"
        )
    return begin, end


@register("insertion")
class InsertionObjective(Objective):
    """Maximize sum_n log p(y_n, place of y_n | the words before it in the order of generation and their places).

    Args:
        order: in which words are generated: left_to_right, right_to_left, odd_even (every second word, then the
            others), tree (the middle first, then the middle of either half, ...), common_first and rare_first (by id,
            which vocabularies give out from common to rare), random (new in every epoch), or searched: of the orders
            that a beam search finds the likeliest under the model one is drawn for training (the bound of section 3.3,
            the orders in the beam being equally probable), and the likeliest is evaluated.
        beam: orders that the search keeps; it takes as many passes as a text has words.
    """

    order: Order = "random"
    beam: int = bounded(8, least=1)

    summary: ClassVar[str] = "words in any order, each with the place where it is inserted (InDIGO)"
    head: ClassVar[str] = "CausalLM"
    collates = InsertionCollator
    shape = "decoder"
    component: ClassVar[tuple[str, str] | None] = ("head", "insertion")
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep")

    def check_fields(self) -> None:
        self._require(self.order in get_args(Order), f"order must be one of {', '.join(get_args(Order))}")

    def raw_block_size(self, block_size: int) -> int:
        self._require(
            block_size >= 4, f"block_size {block_size} must hold two boundaries, a word and the end: at least 4"
        )
        return block_size - 3
