# SPDX-License-Identifier: Apache-2.0
"""SpanBERT's pretraining (Joshi et al. 2020, arXiv 1907.10529, sections 3 and 4): masked spans of random length, told
by their own states and by those of the tokens around them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, TOKEN_COLUMNS, Objective, Row, pad_rows, register
from .masked_lm import MaskingCollator, MaskNoise, actions, apply_noise, given_units, padded


def length_law(p: float, shortest: int, longest: int) -> Tensor:
    """Probabilities of the lengths shortest..longest: p (1 - p)^(l - shortest), made to add up to 1."""
    law = p * (1 - p) ** torch.arange(longest - shortest + 1, dtype=torch.float64)
    return law / law.sum()


@dataclass
class SpanNoise:
    """`spans` [start, stop) of a row, ascending and apart from each other; what becomes of their tokens: `action`
    int8 [n], `random_ids` [n]."""

    spans: list[tuple[int, int]]
    action: Tensor
    random_ids: Tensor


def sample_noise(
    words: Tensor, objective: SpanBertObjective, vocabulary: Tensor, generator: torch.Generator
) -> SpanNoise:
    """Draw the spans of a text. words [n]: the word of each token, -1 for special tokens, which spans do not cross.

    Spans of so many words are put down until ceil(mask_prob m) of the m tokens of words are covered, at which a span
    ends within a word if need be. Spans that touch are one.
    """
    length, tokens = len(words), words.tolist()
    free = [place for place, word in enumerate(tokens) if word >= 0]
    budget = math.ceil(objective.mask_prob * len(free))
    law = length_law(objective.geometric_p, objective.span_min, objective.span_max)
    covered = [False] * length
    left = budget
    while left > 0:
        size = objective.span_min + int(torch.multinomial(law, 1, generator=generator))
        anchor = free[int(torch.randint(len(free), (), generator=generator))]
        if covered[anchor]:
            continue
        place = anchor
        while place > 0 and tokens[place - 1] == tokens[anchor]:
            place -= 1
        entered, before = 0, None
        while place < length and tokens[place] >= 0 and left > 0:
            entered += tokens[place] != before
            if entered > size:
                break
            before = tokens[place]
            left -= not covered[place]
            covered[place] = True
            place += 1
    marks = torch.tensor([False, *covered, False]).int().diff()
    starts, stops = (marks == 1).nonzero().squeeze(1).tolist(), (marks == -1).nonzero().squeeze(1).tolist()
    draws = torch.rand(length, generator=generator, dtype=torch.float64)
    if objective.replacement == "span":
        for start, stop in zip(starts, stops, strict=True):
            draws[start:stop] = draws[start].clone()
    action = actions(draws, objective)
    random_ids = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)]
    return SpanNoise(list(zip(starts, stops, strict=True)), action, random_ids)


def boundary_targets(spans: list[tuple[int, int]], first: int, last: int, most: int) -> tuple[Tensor, Tensor]:
    """(places around it [P, 2], number within its span [P]) of every token of the spans [start, stop).

    A span that begins with the text's first token or ends with its last one has no neighbors; of a longer span the
    first `most` tokens are told.
    """
    around: list[tuple[int, int]] = []
    numbers: list[int] = []
    for start, stop in spans:
        if start > first and stop - 1 < last:
            told = min(stop - start, most)
            around += [(start - 1, stop)] * told
            numbers += range(told)
    return torch.tensor(around, dtype=torch.int64).reshape(-1, 2), torch.tensor(numbers, dtype=torch.int64)


class SpanBertCollator(MaskingCollator):
    """Batches with `input_ids`, `attention_mask`, `labels` [B, T], and for the tokens of spans `span_boundaries`
    [B, P, 2], `span_target_places`, `span_labels` [B, P]."""

    objective: SpanBertObjective
    columns = (*TOKEN_COLUMNS, "special_tokens_mask", "unit_ids", "word_ids")
    masked = "spans"

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        width, side = batch["input_ids"].shape[1], self.padding_side
        noises = [self.noise(row) for row in rows]
        masks, around, numbers, targets = [], [], [], []
        for row, (noise, first, last) in zip(rows, noises, strict=True):
            selected = torch.zeros(len(row), dtype=torch.bool)
            for start, stop in noise.spans:
                selected[start:stop] = True
            places, number = boundary_targets(noise.spans, first, last, self.objective.max_pair_targets)
            masks.append(MaskNoise(selected, noise.action, noise.random_ids))
            targets.append(row.ids[places[:, 0] + 1 + number])
            around.append(places + (width - len(row) if side == "left" else 0))
            numbers.append(number)
        chosen = padded(masks, width, side)
        batch["input_ids"], batch["labels"] = apply_noise(batch["input_ids"], chosen, self.mask_token_id)
        most = max(1, *map(len, numbers))
        pairs = torch.zeros(len(rows), most, 2, dtype=torch.int64)
        for index, places in enumerate(around):
            pairs[index, : len(places)] = places
        batch["span_boundaries"] = pairs
        batch["span_target_places"] = pad_rows(numbers, 0, most)
        batch["span_labels"] = pad_rows(targets, IGNORE_INDEX, most)
        return batch

    def noise(self, row: Row) -> tuple[SpanNoise, int, int]:
        """The noise of a row, and where the first and the last token of its text stand."""
        special = self.special_tokens(row)
        words = given_units(row) if self.objective.masks_units else torch.arange(len(row))
        words = words.masked_fill(special, -1)
        text = (words >= 0).nonzero().squeeze(1).tolist() or [0]
        return sample_noise(words, self.objective, self.vocabulary, self.generator(row.ids)), text[0], text[-1]


@register("span_bert")
class SpanBertObjective(Objective):
    """Predict the tokens of masked spans, from their own states and from those of the two tokens around a span.

    Args:
        mask_prob: share of the tokens that spans cover, rounded up.
        geometric_p: spans have l words with a probability that falls as (1 - p)^l.
        span_min, span_max: fewest and most words of a span.
        whole_word: whether spans consist of words (column `word_ids`); False: every token is a word.
        replacement: whether a span is masked, replaced or kept as a whole ("span"), or token by token ("token").
        mask_token_prob: share of spans that are masked.
        random_prob: share of spans in whose place random tokens stand; the rest are kept.
        max_pair_targets: tokens of a span that its neighbors tell, at most; further ones are told by themselves alone.
        sbo_position_dim: width of the vectors that stand for a token's place in its span.
        sbo_weight: of the loss of what the neighbors tell.
    """

    mask_prob: float | int = bounded(0.15, above=0, below=1)
    geometric_p: float | int = bounded(0.2, above=0, below=1)
    span_min: int = 1
    span_max: int = 10
    whole_word: bool = True
    replacement: Literal["span", "token"] = "span"
    mask_token_prob: float | int = bounded(0.8, least=0, most=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)
    max_pair_targets: int = 20
    sbo_position_dim: int = bounded(200, least=1)
    sbo_weight: float | int = bounded(1.0, least=0)

    summary: ClassVar[str] = "masked spans, from within and from the tokens around them (SpanBERT)"
    head: ClassVar[str] = "SpanBoundary"
    collates = SpanBertCollator
    add_special_tokens: ClassVar[bool] = True
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")

    def check_fields(self) -> None:
        total = self.mask_token_prob + self.random_prob
        self._require(total <= 1 + 1e-9, f"mask_token_prob + random_prob is {total}: it must not exceed 1")
        self._require(
            1 <= self.span_min <= self.span_max,
            f"spans of {self.span_min} to {self.span_max} words: set 1 <= span_min <= span_max",
        )
        self._require(
            self.max_pair_targets >= self.span_max,
            f"max_pair_targets={self.max_pair_targets} is less than the longest span: set it to {self.span_max} at"
            " least",
        )

    @property
    def masks_units(self) -> bool:
        return self.whole_word

    def config_fields(self) -> dict[str, Any]:
        settings = {
            "places": self.max_pair_targets,
            "place_width": self.sbo_position_dim,
            "weight": self.sbo_weight,
        }
        return {"pretraining": {"span_boundary": settings}}
