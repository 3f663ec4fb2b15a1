# SPDX-License-Identifier: Apache-2.0
"""Sentence masking (Zhang, Wei and Zhou 2019, arXiv 1905.06566, section 3.2): write the sentences that are masked."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, Objective, Row, pad_rows, register, round_up
from .masked_lm import MaskingCollator

MASK, KEEP, REPLACE = 0, 1, 2  # what becomes of a chosen sentence


def sample_noise(
    sentences: int, rate: float, mask: float, replace: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen [M], what becomes of them [M], what stands in for them [M]) of a document of so many sentences.

    max(1, round(rate n)) sentences are chosen; each is masked with probability `mask`, replaced with `replace`, else
    kept. What stands in for one is another sentence of the document; the only one of a document is never replaced.
    """
    count = max(1, round(rate * sentences))
    chosen = torch.randperm(sentences, generator=generator)[:count].sort().values
    draw = torch.rand(count, generator=generator)
    kind = torch.full((count,), KEEP)
    kind[draw < mask] = MASK
    kind[(draw >= mask) & (draw < mask + replace)] = REPLACE
    other = torch.randint(max(sentences - 1, 1), (count,), generator=generator)
    other = other + (other >= chosen).long()
    if sentences == 1:
        kind, other = torch.full_like(kind, MASK), torch.zeros_like(other)
    return chosen, kind, other


def apply_noise(
    sentences: list[Tensor], chosen: Tensor, kind: Tensor, other: Tensor, mask_token_id: int
) -> list[Tensor]:
    """The sentences, ids [n_i] each, as the encoder reads them. A masked sentence keeps the token that ends it."""
    noisy = list(sentences)
    for place, what, instead in zip(chosen.tolist(), kind.tolist(), other.tolist()):
        if what == MASK:
            noisy[place] = torch.full_like(sentences[place], mask_token_id)
            noisy[place][-1] = sentences[place][-1]
        elif what == REPLACE:
            noisy[place] = sentences[instead]
    return noisy


class SentenceMaskingCollator(MaskingCollator):
    """Batches with `input_ids`, `attention_mask`, `sentence_ids` [B, T], `target_positions` [B, M], where the chosen
    sentences end in the row (-1: none), and `labels` [B, M, W], what stood there (-100: padding)."""

    objective: SentenceMaskingObjective
    columns = ("sentence_ids",)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        made = [self.corrupt(row) for row in rows]
        ids, numbers, places, targets = map(list, zip(*made))
        width = round_up(max(map(len, ids)), self.pad_to_multiple_of)
        if self.padding_side == "left":
            places = [place + width - len(row) for place, row in zip(places, ids)]
        most = max(map(len, places))
        longest = round_up(max(len(target) for row in targets for target in row), self.pad_to_multiple_of)
        nothing = torch.full((most, longest), IGNORE_INDEX)
        labels = []
        for row in targets:
            padded = nothing.clone()
            padded[: len(row)] = pad_rows(row, IGNORE_INDEX, longest)
            labels.append(padded)
        side = self.padding_side
        return {
            "input_ids": pad_rows(ids, self.pad_token_id, width, side),
            "attention_mask": pad_rows([torch.ones_like(row) for row in ids], 0, width, side),
            "sentence_ids": pad_rows(numbers, -1, width, side),
            "target_positions": pad_rows(places, -1, most),
            "labels": torch.stack(labels),
        }

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """(ids, sentence numbers, places of the chosen sentences' ends, the chosen sentences) of a row."""
        numbers = row.columns.get("sentence_ids")
        if numbers is None:
            raise ValueError(
                "a feature has no 'sentence_ids': make the rows with hf_xformers.data.sentences.document_rows, and set"
                " remove_unused_columns=False so that Trainer keeps them"
            )
        if not len(row):
            raise ValueError("a feature has no sentence; leave out documents without text")
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
        sentences, spec = list(row.ids.split(lengths)), self.objective
        chosen, kind, other = sample_noise(
            len(sentences), spec.mask_rate, spec.mask_prob, spec.random_prob, self.generator(row.ids)
        )
        noisy = apply_noise(sentences, chosen, kind, other, self.mask_token_id)
        sizes = torch.tensor([len(sentence) for sentence in noisy])
        ends = sizes.cumsum(0) - 1
        places = torch.arange(len(sizes)).repeat_interleave(sizes)
        return torch.cat(noisy), places, ends[chosen], [sentences[index] for index in chosen.tolist()]


@register("sentence_masking")
class SentenceMaskingObjective(Objective):
    """Mask whole sentences of a document and write each of them from its vector.

    Args:
        mask_rate: share of a document's sentences that are written, at least one.
        mask_prob: share of these whose words are all masked.
        random_prob: share of these in whose place another sentence of the document stands; the rest are kept.
        max_sentence_length: tokens of a sentence at most, the one that ends it included; what is beyond is left out.
    """

    mask_rate: float | int = bounded(0.15, above=0, most=1)
    mask_prob: float | int = bounded(0.8, least=0, most=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)
    max_sentence_length: int = bounded(50, least=2)

    summary: ClassVar[str] = "sentences that are masked, each written from its vector (HIBERT)"
    corrupts: ClassVar[str] = "15 % of the sentences: masked, another one or kept"
    head: ClassVar[str] = "MaskedSentences"
    collates = SentenceMaskingCollator
    shape = "seq2seq"
    rows = "sentences"
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "sep", "mask")

    def check_fields(self) -> None:
        self._require(
            self.mask_prob + self.random_prob <= 1,
            f"mask_prob {self.mask_prob} and random_prob {self.random_prob} must not add up to more than 1",
        )

    def sentence_length(self, block_size: int) -> int:
        return min(self.max_sentence_length, block_size)

    def target_length(self, block_size: int) -> int:
        return self.sentence_length(block_size)
