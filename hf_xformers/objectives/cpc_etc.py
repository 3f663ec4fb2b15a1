# SPDX-License-Identifier: Apache-2.0
"""Contrastive predictive coding of sentences next to masked words (ETC).

Source: Ainslie et al. 2020 (ETC, arXiv 2004.08483), section 2.3.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, TOKEN_COLUMNS, Row, pad_rows, register, round_up
from .masked_lm import MaskedLMCollator, MaskedLMObjective
from .masked_lm import apply_noise as apply_mask
from .masked_lm import sample_noise as sample_mask


def sample_noise(sentences: int, ratio: float, generator: torch.Generator) -> Tensor:
    """The numbers of the sentences that are masked, in their order: round(ratio * sentences) of them, but at least one
    and never all; none of a single sentence, which has no other next to it."""
    count = min(max(round(ratio * sentences), 1), sentences - 1)
    return torch.randperm(sentences, generator=generator)[:count].sort().values


def apply_noise(ids: Tensor, sentences: Tensor, masked: Tensor, mask_token_id: int) -> Tensor:
    """ids [n] with all tokens of the `masked` sentences replaced; sentences [n]: the number of each token's."""
    return torch.where(torch.isin(sentences, masked), mask_token_id, ids)


class CpcCollator(MaskedLMCollator):
    """Batches as for masked LM, with `sentence_ids` [B, T] (-1: padding), `masked_sentences` [B, M] (-1: none), and
    what stood in these, `sentence_input_ids` and `sentence_attention_mask` [B, M, W]. No token of a masked sentence is
    a target of masked LM."""

    objective: CpcEtcObjective
    columns = (*TOKEN_COLUMNS, "special_tokens_mask", "unit_ids", "word_ids", "sentence_ids")

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        length, side = batch["input_ids"].shape[1], self.padding_side
        made = [self.corrupted(row) for row in rows]
        batch["input_ids"] = pad_rows([ids for ids, *_ in made], self.pad_token_id, length, side)
        batch["labels"] = pad_rows([labels for _, labels, *_ in made], IGNORE_INDEX, length, side)
        batch["sentence_ids"] = pad_rows([numbers for *_, numbers, _, _ in made], -1, length, side)
        most = max(1, max(len(masked) for *_, masked, _ in made))
        width = max((len(text) for *_, texts in made for text in texts), default=1)
        width = round_up(width, self.pad_to_multiple_of)
        batch["masked_sentences"] = pad_rows([masked for *_, masked, _ in made], -1, most)
        ids = torch.full((len(rows), most, width), self.pad_token_id)
        real = torch.zeros_like(ids)
        for row, (*_, texts) in enumerate(made):
            for place, text in enumerate(texts):
                at = slice(width - len(text), width) if side == "left" else slice(len(text))
                ids[row, place, at], real[row, place, at] = text, 1
        return batch | {"sentence_input_ids": ids, "sentence_attention_mask": real}

    def corrupted(self, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """(input ids, labels, sentence numbers from 0, numbers of masked sentences, what stood in them) of a row."""
        given = row.columns.get("sentence_ids")
        if given is None:
            raise ValueError(
                "a feature has no 'sentence_ids': make the rows with hf_xformers.data.sentences.document_rows, and set"
                " remove_unused_columns=False so that Trainer keeps them"
            )
        _, numbers, lengths = torch.unique_consecutive(given, return_inverse=True, return_counts=True)
        generator = self.generator(row.ids)
        masked = sample_noise(len(lengths), self.objective.sentence_mask_ratio, generator)
        special = self.special_tokens(row)
        taken = special | torch.isin(numbers, masked)
        noise = sample_mask(taken, self.objective, self.vocabulary, generator, self.units(row, numbers))
        ids, labels = apply_mask(row.ids, noise, self.mask_token_id)
        texts = row.ids.split(lengths.tolist())
        chosen = [texts[number] for number in masked.tolist()]
        return apply_noise(ids, numbers, masked, self.mask_token_id), labels, numbers, masked, chosen

    def units(self, row: Row, numbers: Tensor | None = None) -> Tensor | None:
        """Words of different sentences apart, which `word_ids` count anew in each."""
        units = super().units(row)
        if units is None or numbers is None or not len(units):
            return units
        return torch.where(units < 0, -1, units + numbers * (int(units.max()) + 1))


@register("cpc_etc")
class CpcEtcObjective(MaskedLMObjective):
    """Predict masked words of a document, and the vectors of its wholly masked sentences among those of the batch.

    Args:
        cpc_weight: factor on the contrastive loss.
        sentence_mask_ratio: share of a document's sentences that are masked, at least one and never all.
        negatives: what a sentence's vector is told apart from: the masked sentences of the "batch", over all
            processes.

    The other settings are those of masked LM, which masks whole words here unless `whole_word` is false.
    """

    cpc_weight: float | int = bounded(1.0, least=0)
    sentence_mask_ratio: float | int = bounded(0.15, above=0, below=1)
    negatives: Literal["batch"] = "batch"

    summary: ClassVar[str] = "masked words, and vectors of masked sentences told apart (ETC)"
    head: ClassVar[str] = "ContrastivePrediction"
    collates = CpcCollator
    preferred: ClassVar[bool] = False
    rows = "sentences"
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "sep", "mask")
    add_special_tokens: ClassVar[bool] = False

    @property
    def masks_units(self) -> bool:
        return True if self.whole_word is None else self.whole_word

    def config_fields(self) -> dict[str, Any]:
        return {"pretraining": {"contrastive_prediction": {"weight": self.cpc_weight}}}
