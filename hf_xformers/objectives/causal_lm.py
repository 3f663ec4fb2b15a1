# SPDX-License-Identifier: Apache-2.0
"""Causal language modeling: predict each token from those before it (Radford et al. 2018, equation 1)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import IGNORE_INDEX, Collator, Objective, Row, register


def causal_labels(ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Labels [B, T] for a loss that shifts inside: the ids themselves, -100 at padding and right behind it (a text's
    first token, where padding is on the left: no real token predicts it).

    Padding is told by `attention_mask`, never by the pad id, so a tokenizer whose pad token is its eos token still
    teaches the model to end. With `position_ids` that restart (packed documents kept apart), the first token of each
    document gets -100 as well: nothing before it belongs to it.
    """
    target = attention_mask.bool()
    target = target & torch.nn.functional.pad(target[:, :-1], (1, 0), value=True)
    if position_ids is not None:
        target = target & (position_ids != 0)
    return torch.where(target, ids, IGNORE_INDEX)


class CausalLMCollator(Collator):
    """Batches with `input_ids`, `attention_mask`, `labels` [B, T] (and token columns the features bring). No shift."""

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        batch["labels"] = causal_labels(batch["input_ids"], batch["attention_mask"], batch.get("position_ids"))
        return batch


@register("clm")
class CausalLMObjective(Objective):
    """Maximize sum_t log p(x_t | x_<t). It has no settings: packing belongs to the data, smoothing to the loss."""

    summary: ClassVar[str] = "each token from those before it (GPT)"
    head: ClassVar[str] = "CausalLM"
    collates = CausalLMCollator
    shape = "decoder"
    preferred: ClassVar[bool] = True
    sample_by = "document"
    tokenizer_style = "gpt"
