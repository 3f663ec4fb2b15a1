# SPDX-License-Identifier: Apache-2.0
"""Permuted language modeling (Yang et al. 2019, XLNet, arXiv 1906.08237): predict tokens in a random order.

Sources: section 2.2 (the order), 2.3 (partial prediction), 2.5 (two halves), appendix A.4 (spans), and the released
data code, whose order is drawn for the two halves of a row by themselves. transformers' collator puts mask tokens
where targets stand, so that no target reads an earlier one; ours leaves the text as it is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, TOKEN_COLUMNS, Collator, Objective, Row, pad_rows, register
from .masked_lm import given_units

_EVERYBODY_SEES = -1  # rank of what is there from the start


@dataclass
class OrderNoise:
    """All that is random about a row: `reverse`, whether it is read from its end, and, as it is then read, `targets`
    bool [n], the tokens that are predicted, and `order` int64 [n], the place of each token in the order."""

    targets: Tensor
    order: Tensor
    reverse: bool


def reading(special: Tensor, reverse: bool) -> Tensor:
    """The places [n] of a row's tokens in the order in which it is read. From the end: all between the first and the
    last token of the text, separators of documents too, so that each stays between the same two; special tokens
    around them stay where they are."""
    places = torch.arange(len(special))
    text = (~special).nonzero().squeeze(1)
    if reverse and len(text):
        inner = slice(int(text[0]), int(text[-1]) + 1)
        places[inner] = places[inner].flip(0)
    return places


def sample_noise(
    special: Tensor, objective: PermutedLMObjective, generator: torch.Generator, words: Tensor | None = None
) -> OrderNoise:
    """Draw the noise of one row; special [n] bool: never predicted; words [n]: a number that changes where another
    word begins (None: every token is one)."""
    reverse = bool(objective.bi_data and torch.rand((), generator=generator) < 0.5)
    places = reading(special, reverse)
    special, starts = special[places], torch.ones_like(special)
    if words is not None:
        starts[1:] = words[places][1:] != words[places][:-1]
    targets, order = torch.zeros_like(special), torch.empty(len(special), dtype=torch.int64)
    bounds = objective.bounds(len(special))
    for begin, end in itertools.pairwise(bounds):
        part = slice(begin, end)
        goal = min(objective.num_targets(begin, end, len(special)), int((~special[part]).sum()))
        targets[part] = _spans(special[part], starts[part], goal, objective, generator)
        size = min(objective.perm_size or end - begin, end - begin)
        turn = torch.randperm(size, generator=generator)  # the same in every block, as released
        place = torch.arange(end - begin)
        order[part] = begin + (place // size) * size + turn[place % size]
    if not bool(targets.any()) and not bool(special.all()):  # a mean over nothing is NaN
        free = (~special).nonzero().squeeze(1)
        targets[free[torch.randint(len(free), (1,), generator=generator)]] = True
    return OrderNoise(targets, order, reverse)


def _spans(
    special: Tensor, starts: Tensor, goal: int, objective: PermutedLMObjective, generator: torch.Generator
) -> Tensor:
    """`goal` targets [n]: spans of 1..max_gram words, p(l) ~ 1/l, each at a random place of a context of
    l mask_alpha / mask_beta tokens, and single tokens for what is missing."""
    chosen, found, at, length = torch.zeros_like(special), 0, 0, len(special)
    weights = 1.0 / torch.arange(1, objective.max_gram + 1, dtype=torch.float64)
    begins = starts.nonzero().squeeze(1).tolist()
    while found < goal and at < length:
        size = min(1 + int(torch.multinomial(weights, 1, generator=generator)), goal - found)
        context = max(1, size * objective.mask_alpha // objective.mask_beta)
        left = int(torch.randint(context, (1,), generator=generator))
        words = [place for place in begins if place >= at + left][: size + 1]
        if len(words) <= size:  # it would reach the end
            break
        span = torch.zeros_like(special)
        span[words[0] : words[-1]] = True
        span &= ~special
        chosen |= span
        found = int(chosen.sum())
        at = words[-1] + context - left
    free = (~special & ~chosen).nonzero().squeeze(1)
    extra = free[torch.randperm(len(free), generator=generator)][: max(0, goal - found)]
    chosen[extra] = True
    return chosen


def hidden_pairs(order: Tensor, targets: Tensor, special: Tensor, middle: int) -> Tensor:
    """`perm_mask` [n, n]: True where token i must not see token j.

    A token that is neither target nor special is seen by everybody, and sees no target. A target sees what comes
    before it in `order` [n], a special token that is at its own place too. The tokens before `middle` see none behind.
    """
    ranked = targets | special
    rank = torch.where(ranked, order, _EVERYBODY_SEES)
    own = torch.where(targets & ~special, rank, rank + 1)
    hidden = (own[:, None] <= rank[None, :]) & ranked[None, :]
    first = torch.arange(len(order)) < middle
    hidden = torch.where(first[:, None] == first[None, :], hidden, False)
    return hidden | (first[:, None] & ~first[None, :])


def apply_noise(ids: Tensor, noise: OrderNoise, special: Tensor, middle: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [n], `perm_mask` [n, n], places of the targets [k])."""
    places = reading(special, noise.reverse)
    hidden = hidden_pairs(noise.order, noise.targets, special[places], middle)
    return ids[places], hidden, noise.targets.nonzero().squeeze(1)


class PermutedLMCollator(Collator):
    """Batches with `input_ids`, `attention_mask` [B, T], `perm_mask` [B, T, T], `target_mapping` [B, N, T] and
    `labels` [B, N] (-100: no target)."""

    objective: PermutedLMObjective
    columns = (*TOKEN_COLUMNS, "special_tokens_mask", "unit_ids", "word_ids")

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        made = [self.corrupt(row) for row in rows]
        batch = self.pad_inputs(
            [Row(ids, row.columns, row.width) for row, (ids, _, _) in zip(rows, made, strict=True)]
        )
        width = batch["input_ids"].shape[1]
        bounds = self.objective.bounds(width)
        room = sum(self.objective.num_targets(begin, end, width) for begin, end in itertools.pairwise(bounds))
        room = max(1, room, *(len(places) for _, _, places in made))  # no targets at all are no shape for a model
        batch["perm_mask"] = torch.zeros(len(rows), width, width, dtype=torch.bool)
        batch["target_mapping"] = torch.zeros(len(rows), room, width)
        for index, (ids, hidden, places) in enumerate(made):
            start = width - len(ids) if self.padding_side == "left" else 0
            batch["perm_mask"][index, start : start + len(ids), start : start + len(ids)] = hidden
            batch["target_mapping"][index, torch.arange(len(places)), places + start] = 1.0
        batch["labels"] = pad_rows([ids[places] for ids, _, places in made], IGNORE_INDEX, room)
        return batch

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        special = self.special_tokens(row)
        noise = sample_noise(special, self.objective, self.generator(row.ids), self.words(row))
        bounds = self.objective.bounds(len(row))
        return apply_noise(row.ids, noise, special, bounds[1] if len(bounds) > 2 else 0)

    def words(self, row: Row) -> Tensor | None:
        """The word of each token, [n]; None: each is one."""
        return given_units(row) if self.objective.masks_units else None


@register("permuted_lm", aliases=("plm", "xlnet"))
class PermutedLMObjective(Objective):
    """Predict the last tokens of a random order, each from those before it, with the text as it is.

    Args:
        mask_alpha, mask_beta: one token in mask_alpha / mask_beta is predicted (the paper's K = 6).
        max_gram: longest span of targets; p(l) ~ 1 / l.
        num_predict: targets of a row, in place of its share (the paper: 85 of 512).
        reuse_len: tokens of the first part of a row, which sees nothing of the second; None: half of the row, 0: there
            is one part alone.
        perm_size: tokens of a block within which an order is drawn, the same for all of a part; None: a part.
        bi_data: half of the rows, at random, are read from their end.
        whole_word: spans are of whole words (column `word_ids`); False: of tokens, as in the released code.
    """

    mask_alpha: int = bounded(6, least=1)
    mask_beta: int = bounded(1, least=1)
    max_gram: int = bounded(5, least=1)
    num_predict: int | None = bounded(None, least=1)
    reuse_len: int | None = bounded(None, least=0)
    perm_size: int | None = bounded(None, least=1)
    bi_data: bool = True
    whole_word: bool = False

    summary: ClassVar[str] = "tokens in a random order, each from those before it (XLNet)"
    head: ClassVar[str] = "MaskedLM"
    collates = PermutedLMCollator
    component: ClassVar[tuple[str, str] | None] = ("stack", "two_stream")
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep")
    add_special_tokens: ClassVar[bool] = True

    def check_fields(self) -> None:
        self._require(
            self.mask_beta <= self.mask_alpha,
            f"mask_beta {self.mask_beta} of mask_alpha {self.mask_alpha} tokens cannot be predicted: lower it",
        )
        self._require(
            not self.reuse_len or self.perm_size is None or self.perm_size <= self.reuse_len,
            f"perm_size {self.perm_size} must not exceed reuse_len {self.reuse_len}: lower it",
        )

    @property
    def masks_units(self) -> bool:
        return self.whole_word

    def bounds(self, length: int) -> list[int]:
        """Where the parts of a row of so many tokens begin, and its end."""
        middle = length // 2 if self.reuse_len is None else self.reuse_len
        return [0, middle, length] if 0 < middle < length else [0, length]

    def num_targets(self, begin: int, end: int, length: int) -> int:
        """Targets in the part [begin, end) of a row of `length` tokens; those of its parts add up to `num_predict`."""
        if self.num_predict is None:
            return round((end - begin) * self.mask_beta / self.mask_alpha)
        upto = [round(self.num_predict * place / max(length, 1)) for place in (begin, end)]
        return min(end - begin, upto[1] - upto[0])
