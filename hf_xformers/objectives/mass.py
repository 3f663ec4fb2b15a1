# SPDX-License-Identifier: Apache-2.0
"""MASS, masked sequence to sequence pretraining: a fragment of a text is masked, and the decoder writes it.

Source: Song et al. 2019 (arXiv 1905.02450), section 3.2, and the released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, Objective, Row, pad_rows, register, round_up
from .masked_lm import KEEP, MaskingCollator, MaskNoise, actions
from .masked_lm import apply_noise as mask_tokens


@dataclass
class FragmentNoise:
    """The fragment [start, stop) of a row, and what becomes of its tokens: `action` int8 [n], `random_ids` [n]."""

    start: int
    stop: int
    action: Tensor
    random_ids: Tensor


def sample_noise(
    first: int, end: int, length: int, objective: MassObjective, vocabulary: Tensor, generator: torch.Generator
) -> FragmentNoise:
    """Draw the fragment of a row of `length` tokens, whose text stands in [first, end).

    It has round(fragment_ratio m) of the text's m tokens, at least one, and begins at any of them ("uniform"), or in
    a fifth of the rows at the first, in a fifth where it ends the text.
    """
    size = min(max(round(objective.fragment_ratio * (end - first)), 1), end - first)
    draw = float(torch.rand((), generator=generator, dtype=torch.float64))
    start = first + int(torch.randint(max(end - first - size, 0) + 1, (), generator=generator))
    if objective.start_mode == "20_20_60" and draw < 0.4:
        start = first if draw < 0.2 else end - size
    action = actions(torch.rand(length, generator=generator, dtype=torch.float64), objective)
    random_ids = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)]
    return FragmentNoise(start, start + size, action, random_ids)


def apply_noise(ids: Tensor, noise: FragmentNoise, mask_token_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(encoder inputs [n], decoder inputs [k], labels [k], position ids of the decoder inputs [k]) of the row `ids`.

    Decoder inputs are the tokens one place before the labels, and keep the places that they have in the row.
    """
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    chosen[noise.start : noise.stop] = True
    inputs, _ = mask_tokens(ids, MaskNoise(chosen, noise.action, noise.random_ids), mask_token_id)
    places = torch.arange(noise.start - 1, noise.stop - 1)
    return inputs, ids[places], ids[noise.start : noise.stop], places


class MassCollator(MaskingCollator):
    """Batches with `input_ids`, `attention_mask` [B, T], `decoder_input_ids`, `decoder_attention_mask`,
    `decoder_position_ids` and `labels` [B, K].

    A row's first token is never in the fragment. Special tokens within the fragment are neither masked nor targets.
    Decoder rows are padded on the right.
    """

    objective: MassObjective
    columns = ("special_tokens_mask",)
    masked = "the fragment"

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        inputs, read, written, places = zip(*map(self.corrupt, rows), strict=True)
        width = round_up(max(row.width for row in rows), self.pad_to_multiple_of)
        short = round_up(max(map(len, read)), self.pad_to_multiple_of)
        side = self.padding_side
        return {
            "input_ids": pad_rows(inputs, self.pad_token_id, width, side),
            "attention_mask": pad_rows([torch.ones_like(row) for row in inputs], 0, width, side),
            "decoder_input_ids": pad_rows(read, self.pad_token_id, short),
            "decoder_attention_mask": pad_rows([torch.ones_like(row) for row in read], 0, short),
            "decoder_position_ids": pad_rows(places, 0, short),
            "labels": pad_rows(written, IGNORE_INDEX, short),
        }

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `apply_noise` returns, with -100 for special tokens among the labels."""
        special = self.special_tokens(row)
        text = (~special).nonzero().squeeze(1)
        text = text[text > 0]
        if not len(text):  # nothing to write
            start = row.ids[:1]
            return row.ids, start, torch.full_like(start, IGNORE_INDEX), torch.zeros_like(start)
        noise = sample_noise(
            int(text[0]), int(text[-1]) + 1, len(row), self.objective, self.vocabulary, self.generator(row.ids)
        )
        noise.action[special] = KEEP
        inputs, read, written, places = apply_noise(row.ids, noise, self.mask_token_id)
        return inputs, read, written.masked_fill(special[noise.start : noise.stop], IGNORE_INDEX), places


@register("mass")
class MassObjective(Objective):
    """Write a fragment of a text that is masked where it stood; a decoder reads no more than the fragment.

    Args:
        fragment_ratio: share of the text that is the fragment.
        start_mode: where it begins: "20_20_60" in a fifth of the rows with the text, in a fifth so that it ends with
            the text, else anywhere; "uniform" anywhere.
        mask_token_prob: share of the fragment's tokens that the encoder sees masked.
        random_prob: share of these in whose place a random token stands; the rest are kept.
    """

    fragment_ratio: float | int = bounded(0.5, above=0, most=1)
    start_mode: Literal["uniform", "20_20_60"] = "20_20_60"
    mask_token_prob: float | int = bounded(0.8, least=0, most=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)

    summary: ClassVar[str] = "a fragment of a text, written where it stood (MASS)"
    head: ClassVar[str] = "Seq2SeqLM"
    collates = MassCollator
    shape = "seq2seq"
    add_special_tokens: ClassVar[bool] = True
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    decoder_starts_with = "cls"

    def check_fields(self) -> None:
        total = self.mask_token_prob + self.random_prob
        self._require(total <= 1 + 1e-9, f"mask_token_prob + random_prob is {total}: it must not exceed 1")

    def target_length(self, block_size: int) -> int:
        return max(round(self.fragment_ratio * block_size), 1)
