# SPDX-License-Identifier: Apache-2.0
"""Bidirectional language modeling (Peters et al. 2018, ELMo, arXiv 1802.05365, section 3.1): each token from those
before it, and by another model from those behind it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from ..core.losses import direction_targets
from .base import Collator, Objective, Row, register


class BidirectionalLMCollator(Collator):
    """Batches with `input_ids`, `attention_mask` [B, T] and `labels` [B, T, 2]: at each token the next one and the one
    before it, -100 where there is none. Nothing is random."""

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        if any("position_ids" in row.columns for row in rows):
            raise ValueError(
                "rows bring 'position_ids', and texts that are reversed have places of their own: give one document"
                " per row, without that column"
            )
        batch = self.pad_inputs(rows)
        batch["labels"] = direction_targets(batch["input_ids"], batch["attention_mask"].bool())
        return batch


@register("bidirectional_lm", aliases=("bilm", "elmo"))
class BidirectionalLMObjective(Objective):
    """Maximize sum_t log p_F(x_t | x_<t) + log p_G(x_t | x_>t), with two causal models F and G.

    Args:
        share_embeddings: one embedding of tokens for both.
        share_softmax: one output for both.
        mix: what a token's vector is: "concat", the last states of both side by side, or "scalar", a learned mix of
            the states of all layers.
    """

    share_embeddings: bool = True
    share_softmax: bool = True
    mix: Literal["concat", "scalar"] = "concat"

    summary: ClassVar[str] = "each token from those before it, and apart from those behind it (ELMo)"
    head: ClassVar[str] = "BidirectionalLM"
    collates = BidirectionalLMCollator
    shape = "decoder"
    sample_by = "document"
    tokenizer_style = "gpt"

    def config_fields(self) -> dict[str, Any]:
        settings = {"share_embedding": self.share_embeddings, "share_softmax": self.share_softmax, "mix": self.mix}
        return {"pretraining": {"bidirectional_lm": settings}}
