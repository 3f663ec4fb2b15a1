"""Detection of replaced tokens: which tokens of a text a generator has put there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.inputs import check_token_labels
from ..core.losses import token_binary_cross_entropy
from .classifiers import Classifier


class XFormerForReplacedTokenDetection(Classifier):
    """An encoder that says of every token whether it was replaced.

    D(x, t) = sigmoid(w h_t + b), with a hidden layer before it under `classifier_transform="dense"` (Clark et al.
    2020, ELECTRA, arXiv 2003.10555, section 2, and its released code).
    """

    reads_pooler = False
    reads_every_token = True
    accepts_loss_kwargs = True  # `num_items_in_batch`
    loss_weight: float | None = None

    def __init__(self, config):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False), 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerTokenClassifierOutput:
        """labels: [B, T], 1 = replaced, 0 = original, -100 where a token does not count, as padding never does.
        logits: [B, T], positive where a token seems to be replaced."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        scores = self.classifier(self.transformed(base.last_hidden_state))
        loss = None
        if labels is not None:
            check_token_labels(labels, scores)
            if attention_mask is not None and attention_mask.shape == labels.shape:
                labels = labels.masked_fill(attention_mask == 0, -100)
            loss = token_binary_cross_entropy(scores.squeeze(-1), labels, count)
            loss = loss if self.loss_weight is None else self.loss_weight * loss
        recorded = self.recorded(base, loss)
        return outputs.XFormerTokenClassifierOutput(
            loss=self.with_aux_losses(loss, base), logits=scores.squeeze(-1), **recorded
        )


__all__ = ["XFormerForReplacedTokenDetection"]
