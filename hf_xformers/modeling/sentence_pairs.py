# SPDX-License-Identifier: Apache-2.0
"""Models of pairs of sentences, with and without masked tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.components import bounded
from ..core.losses import step_share, token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .classifier_transform import refuse_transform
from .classifiers import Classifier
from .masked_and_class import MaskedTokensAndClass


@register_pretraining("sentence_pairs")
class SentencePairsSpec(PretrainingSpec):
    """classes: labels of a pair: 2 for next sentence or sentence order, 3 for both at once."""

    summary = "masked tokens, and how the two texts of a pair belong together (BERT, ALBERT, StructBERT)"

    classes: int = bounded(2, least=2)


class XFormerForNextSentencePrediction(Classifier):
    """Two-way classification of a pair of texts: next sentence (BERT) or sentence order (ALBERT). Class 0: B follows
    A."""

    def __init__(self, config: XFormerConfig):
        refuse_transform(config, type(self).__name__)
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False), 2)

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
    ) -> outputs.XFormerSentencePairOutput:
        """labels: [B], 0 = B follows A, 1 = it does not. logits: [B, 2]."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.pooled(base, attention_mask))
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        recorded = self.recorded(base, loss)
        return outputs.XFormerSentencePairOutput(
            loss=self.with_aux_losses(loss, base, share=step_share(labels, count)), logits=logits, **recorded
        )


class XFormerForPreTraining(MaskedTokensAndClass):
    """BERT's two objectives at once: masked tokens, and a label for the pair of texts, which is one of `classes`
    of [`SentencePairsSpec`]. Its loss is the auxiliary loss `pair`."""

    def num_classes(self, config: Any) -> int:
        return SentencePairsSpec.of(config).classes

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerForPreTrainingOutput:
        """labels: [B, T] as in masked LM; next_sentence_label: [B], 0 = B follows A, 1 = it does not, and of three
        classes 2 = it comes before A. The loss is the sum of the two and is returned when both labels are given."""
        count = kwargs.pop("num_items_in_batch", None)
        base, logits, pair_logits = self.both_logits(
            attention_mask,
            labels,
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        loss, aux_losses = None, dict(base.aux_losses or {})
        if labels is not None and next_sentence_label is not None:
            loss = token_cross_entropy(logits, labels, count)
            aux_losses["pair"] = token_cross_entropy(pair_logits, next_sentence_label.view(-1))
        return outputs.XFormerForPreTrainingOutput(
            loss=self.with_aux_losses(loss, base, aux_losses=aux_losses, share=step_share(labels, count)),
            prediction_logits=logits,
            seq_relationship_logits=pair_logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )
