"""Masked language modeling of the last tokens of a row."""

from typing import ClassVar

import torch

from hf_xformers.extend import bounded
from hf_xformers.objectives import IGNORE_INDEX, Collator, Objective, pad_rows, register


class LastTokensCollator(Collator):
    def collate(self, rows):
        batch = self.pad_inputs(rows)  # input_ids and attention_mask [B, T]; rows know nothing of padding
        first = [min(len(row) - 1, round((1 - self.objective.fraction) * len(row))) for row in rows]
        targets = [torch.arange(len(row)) >= start for row, start in zip(rows, first)]
        target = pad_rows(targets, False, batch["input_ids"].shape[1], self.padding_side)
        batch["labels"] = torch.where(target, batch["input_ids"], IGNORE_INDEX)
        batch["input_ids"] = torch.where(target, self.tokenizer.mask_token_id, batch["input_ids"])
        return batch


@register("last_tokens")
class LastTokensObjective(Objective):
    """Predict the last tokens of a row, all of them masked. fraction: of the row's tokens that are masked."""

    fraction: float = bounded(0.25, above=0, below=1)
    head: ClassVar[str] = "MaskedLM"

    def collator(self, tokenizer, **settings) -> LastTokensCollator:
        if tokenizer.mask_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__} has no mask token: choose the 'clm' objective")
        return LastTokensCollator(self, tokenizer, **settings)
