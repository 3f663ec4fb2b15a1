# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling and the order of a document's parts at once."""

from __future__ import annotations

from math import factorial
from typing import Any

from torch import Tensor
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.components import bounded
from ..core.losses import step_share, token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .masked_and_class import MaskedTokensAndClass


def count_orders(chunks: int) -> int:
    """Ways in which a text of 1, 2, ... `chunks` parts can stand: sum of i!."""
    return sum(factorial(parts) for parts in range(1, chunks + 1))


@register_pretraining("reordering")
class ReorderingSpec(PretrainingSpec):
    """chunks: most parts that a document is cut in, whose order is told."""

    summary = "masked tokens, and the order of a document's parts (ERNIE-Doc)"

    chunks: int = bounded(3, least=1)


class XFormerForSegmentReordering(MaskedTokensAndClass):
    """An encoder that predicts masked tokens, and in which order the parts of the document stand (Ding et al. 2021,
    arXiv 2012.15688, section 3.4).

    A document of 1 to m parts (`chunks` of [`ReorderingSpec`]) has one of sum_i i! orders, which a classifier on the
    pooled vector tells apart. Its loss is the auxiliary loss `reordering`.

    Raises:
        ValueError: a stack without segment memory.
    """

    def num_classes(self, config: Any) -> int:
        if config.stack.memory_slots(config) is None:
            raise ValueError(
                f"{type(self).__name__} reads documents in segments with a memory, which stack {config.stack.type!r}"
                " has not. Use xf_ernie_doc."
            )
        return count_orders(ReorderingSpec.of(config).chunks)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        reordering_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerReorderingOutput:
        """labels: [B, T] as in masked LM; reordering_labels: [B], the number of the order. logits: [B, T, V];
        reordering_logits: [B, orders]. The loss is the sum of those whose labels are given."""
        count = kwargs.pop("num_items_in_batch", None)
        base, logits, orders = self.both_logits(
            attention_mask,
            labels,
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        loss, aux_losses = None, dict(base.aux_losses or {})
        if reordering_labels is not None:
            aux_losses["reordering"] = token_cross_entropy(orders, reordering_labels.view(-1))
        if labels is not None:
            loss = token_cross_entropy(logits, labels, count)
        elif reordering_labels is not None:
            loss = logits.new_zeros(())
        return outputs.XFormerReorderingOutput(
            loss=self.with_aux_losses(loss, base, aux_losses=aux_losses, share=step_share(labels, count)),
            logits=logits,
            reordering_logits=orders,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )
