# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling, and which names were replaced by others of their type."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.inputs import check_token_labels
from ..core.losses import step_share, token_binary_cross_entropy, token_cross_entropy
from .language_model import LanguageModel


class XFormerForEntityReplacement(LanguageModel):
    """An encoder that predicts masked tokens, and says of every name whether it was replaced.

    p = sigmoid(w^T [x_(s-1); x_(e+1)] + b), from the states of the tokens around the name s..e (Xiong et al. 2020,
    arXiv 1912.09637, section 2.3). Its loss, the mean over names, is the auxiliary loss `entity_replacement`.
    """

    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False))
        self.entity_classifier = nn.Linear(2 * self.config.stack.output_width(self.config), 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        entity_boundaries: Tensor | None = None,
        entity_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerEntityReplacementOutput:
        """labels: [B, T] as in masked LM; entity_boundaries: [B, M, 2], where the tokens before and behind each name
        stand in the row; entity_labels: [B, M], 1 = replaced, 0 = true, -100 = none. logits: [B, T, V];
        entity_logits: [B, M], positive where a name seems to be replaced."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        states = base.last_hidden_state
        logits = self.lm_head(states)
        check_token_labels(labels, logits)
        aux_losses, scores = dict(base.aux_losses or {}), None
        if entity_boundaries is not None:
            index = entity_boundaries.to(states.device).clamp(min=0, max=states.shape[1] - 1)
            around = states.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, states.shape[-1]))
            scores = self.entity_classifier(around.unflatten(1, (-1, 2)).flatten(2)).squeeze(-1)
            if entity_labels is not None:
                check_token_labels(entity_labels, scores.unsqueeze(-1), "entity_labels")
                aux_losses["entity_replacement"] = token_binary_cross_entropy(scores, entity_labels)
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        return outputs.XFormerEntityReplacementOutput(
            loss=self.with_aux_losses(loss, base, aux_losses=aux_losses, share=step_share(labels, count)),
            logits=logits,
            entity_logits=scores,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )
