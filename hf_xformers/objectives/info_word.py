# SPDX-License-Identifier: Apache-2.0
"""Which phrase was masked in a text, among those of other texts, besides masked tokens: InfoWord.

Source: Kong et al. 2020 (arXiv 1910.08350), sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Objective, Row, pad_rows, register, round_up
from .contrastive import text_key
from .masked_lm import KEEP, MASK, MaskingCollator, MaskNoise, actions
from .masked_lm import apply_noise as mask_tokens


@dataclass
class PhraseNoise:
    """Where the phrase start..stop-1 of a row stands (empty: there is none), and what becomes of its tokens."""

    start: int
    stop: int
    masks: MaskNoise


def sample_noise(
    special: Tensor, objective: InfoWordObjective, vocabulary: Tensor, generator: torch.Generator
) -> PhraseNoise:
    """Draw the phrase of a row and the other tokens that are predicted; special [n] bool: in no phrase, never targets.

    round(mask_prob m) of the m other tokens are targets, at least one. The phrase has as many of them as a draw of
    N(span_mean, span_std), rounded and clipped, says; if no run of tokens is that long, as many as the longest has.
    Every place that holds it is as likely. The rest of the targets are drawn from outside it, without replacement.
    """
    length = len(special)
    free = (~special).nonzero().squeeze(1)
    budget = max(1, round(objective.mask_prob * len(free)))
    drawn = objective.span_mean + objective.span_std * float(torch.randn((), generator=generator, dtype=torch.float64))
    size = min(max(objective.span_min, min(objective.span_max, round(drawn))), budget)
    runs, run = [], 0  # how many tokens of text stand from a place on
    for blocked in special.flip(0).tolist():
        run = 0 if blocked else run + 1
        runs.append(run)
    runs.reverse()
    size = min(size, max(runs, default=0))
    selected, action = torch.zeros(length, dtype=torch.bool), torch.full((length,), KEEP, dtype=torch.int8)
    random_ids = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)]
    if not size:
        return PhraseNoise(0, 0, MaskNoise(selected, action, random_ids))
    places = [place for place, run in enumerate(runs) if run >= size]
    start = places[int(torch.randint(len(places), (), generator=generator))]
    stop = start + size
    outside = free[(free < start) | (free >= stop)]
    selected[outside[torch.randperm(len(outside), generator=generator)[: budget - size]]] = True
    action = actions(torch.rand(length, generator=generator, dtype=torch.float64), objective)
    selected[start:stop] = True
    action[start:stop] = MASK
    return PhraseNoise(start, stop, MaskNoise(selected, action, random_ids))


def apply_noise(ids: Tensor, begin: int, end: int, noise: PhraseNoise, mask_token_id: int) -> tuple[Tensor, ...]:
    """(input_ids [n], labels [n], the phrase by itself [k]) of ids [n], whose text stands in begin..end-1: what is
    before and behind the text stands around the phrase, too. Without a phrase the last is empty."""
    inputs, labels = mask_tokens(ids, noise.masks, mask_token_id)
    if noise.start == noise.stop:
        return inputs, labels, ids[:0]
    return inputs, labels, torch.cat([ids[:begin], ids[noise.start : noise.stop], ids[end:]])


class InfoWordCollator(MaskingCollator):
    """Batches with `input_ids`, `attention_mask`, `labels` [B, T] as for masked LM, and the phrase that is masked in
    each row: `phrase_input_ids`, `phrase_attention_mask` [B, W], `phrase_keys` [B] (equal for equal phrases)."""

    objective: InfoWordObjective
    columns = ("special_tokens_mask",)
    masked = "phrases"

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        inputs, labels, phrases = zip(*map(self.corrupted, rows), strict=True)
        batch = self.pad_inputs(rows)
        width, side = batch["input_ids"].shape[1], self.padding_side
        batch["input_ids"] = pad_rows(inputs, self.pad_token_id, width, side)
        batch["labels"] = pad_rows(labels, -100, width, side)
        most = round_up(max(1, *map(len, phrases)), self.pad_to_multiple_of)
        batch["phrase_input_ids"] = pad_rows(phrases, self.pad_token_id, most, side)
        batch["phrase_attention_mask"] = pad_rows([torch.ones_like(phrase) for phrase in phrases], 0, most, side)
        batch["phrase_keys"] = torch.tensor([text_key(phrase) for phrase in phrases])
        return batch

    def corrupted(self, row: Row) -> tuple[Tensor, ...]:
        special = self.special_tokens(row)
        text = (~special).nonzero().squeeze(1).tolist() or [0]
        noise = sample_noise(special, self.objective, self.vocabulary, self.generator(row.ids))
        return apply_noise(row.ids, text[0], text[-1] + 1, noise, self.tokenizer.mask_token_id)


@register("info_word", aliases=("infoword", "deep_infomax"))
class InfoWordObjective(Objective):
    """Find the phrase that is masked in a text among those of the other texts, and predict masked tokens.

    Args:
        dim_weight: of the loss of phrases (Deep InfoMax).
        mlm_weight: of the loss of masked tokens.
        span_mean, span_std: of the number of tokens in a phrase, which is normally distributed.
        span_min, span_max: fewest and most tokens of a phrase.
        mask_prob: share of the tokens that are predicted, those of the phrase among them.
        mask_token_prob: share of these, outside the phrase, that are masked; the phrase is masked as a whole.
        random_prob: share in whose place random tokens stand; the rest are kept.
        temperature: what the product of two vectors is divided by to be their score (the paper has none).
        gather_negatives: whether phrases of the other processes are wrong answers, too.

    A batch has at least two texts. A phrase that is equal to a text's own is no wrong answer for it.
    """

    dim_weight: float | int = bounded(1.0, least=0)
    mlm_weight: float | int = bounded(1.0, least=0)
    span_mean: float | int = 5.0
    span_std: float | int = bounded(1.0, least=0)
    span_min: int = 1
    span_max: int = 10
    mask_prob: float | int = bounded(0.15, above=0, below=1)
    mask_token_prob: float | int = bounded(0.8, least=0, most=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)
    temperature: float | int = bounded(1.0, above=0)
    gather_negatives: bool = True

    summary: ClassVar[str] = "the phrase masked in a text, among those of others (InfoWord)"
    corrupts: ClassVar[str] = "15 % of the tokens: a phrase, and single ones"
    head: ClassVar[str] = "PhraseContrast"
    collates = InfoWordCollator
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    add_special_tokens: ClassVar[bool] = True
    rows_at_once: ClassVar[int] = 2

    def check_fields(self) -> None:
        self._require(self.dim_weight + self.mlm_weight > 0, "dim_weight and mlm_weight are both 0: set one above")
        total = self.mask_token_prob + self.random_prob
        self._require(total <= 1 + 1e-9, f"mask_token_prob + random_prob is {total}: it must not exceed 1")
        self._require(
            1 <= self.span_min <= self.span_max,
            f"phrases of {self.span_min} to {self.span_max} tokens: set 1 <= span_min <= span_max",
        )

    def config_fields(self) -> dict[str, Any]:
        settings = {
            "temperature": self.temperature,
            "contrast_weight": self.dim_weight,
            "masked_lm_weight": self.mlm_weight,
            "gather_negatives": self.gather_negatives,
        }
        return {"pretraining": {"phrase_contrast": settings}}
