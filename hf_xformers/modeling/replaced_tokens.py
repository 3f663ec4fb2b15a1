# SPDX-License-Identifier: Apache-2.0
"""Detection of replaced tokens: which tokens of a text a generator has put there."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.utils import can_return_tuple

from ..compat import shared_setting
from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.components import bounded
from ..core.inputs import check_token_labels
from ..core.losses import counted_of, step_share, token_binary_cross_entropy
from ..core.pooling import fitting, pool
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .classifiers import Classifier


@register_pretraining("replaced_tokens")
class ReplacedTokensSpec(PretrainingSpec):
    """
    Args:
        generator_size: the generator's width, as a share of the model's.
        generator_depth: its number of layers, the same way.
        generator_sharing: `tied`, one token table and one position table for both (ELECTRA); `gradient_disentangled`,
            the model's token vectors are the generator's, whose gradient it leaves alone, and a difference of its own
            (DeBERTaV3); `untied`.
        generator_temperature: of the draw.
        generator_avoids_original: whether a token is never drawn in its own place.
        detection_weight: of the detection's loss next to the generator's.
        detection_context: whether a token is judged next to the text's first one (DeBERTaV3).
    """

    summary = "which tokens of a text a small generator has put there (ELECTRA, DeBERTaV3)"

    generator_size: float | int = bounded(0.25, above=0, most=1)
    generator_depth: float | int = bounded(1.0, above=0, most=1)
    generator_sharing: Literal["tied", "gradient_disentangled", "untied"] = "tied"
    generator_temperature: float | int = bounded(1.0, above=0)
    generator_avoids_original: bool = False
    detection_weight: float | int = bounded(50.0, least=0)
    detection_context: bool = False


class TextContext(nn.Module):
    """f(W LN(h_t + h_1) + b), h_1 the state of the first token (He et al. 2021, DeBERTaV3, arXiv 2111.09543, released
    code)."""

    def __init__(self, config: XFormerConfig):
        super().__init__()
        width = config.stack.output_width(config)
        self.norm = nn.LayerNorm(width, eps=shared_setting(config, "layer_norm_eps"))
        self.dense = nn.Linear(width, width)
        self.activation = ACT2FN[config.classifier_activation]

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """states [B, T, D], mask [B, T] -> [B, T, D]."""
        first = pool(states, fitting(mask, states), "first")
        return self.activation(self.dense(self.norm(states + first.unsqueeze(1))))


class XFormerForReplacedTokenDetection(Classifier):
    """An encoder that says of every token whether it was replaced.

    D(x, t) = sigmoid(w h_t + b), with a hidden layer before it under `classifier_transform="dense"` (Clark et al.
    2020, ELECTRA, arXiv 2003.10555, section 2, and its released code).
    With `detection_context` of [`ReplacedTokensSpec`] a token is judged next to the text ([`TextContext`]).
    """

    reads_pooler = False
    reads_every_token = True
    accepts_loss_kwargs = True  # `num_items_in_batch`
    loss_weight: float | None = None

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False), 1)
        self.settings = ReplacedTokensSpec.of(self.config)
        self.context = TextContext(self.config) if self.settings.detection_context else None
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
        states = base.last_hidden_state
        states = states if self.context is None else self.context(states, attention_mask)
        scores = self.classifier(self.transformed(states))
        loss = None
        if labels is not None:
            check_token_labels(labels, scores)
            if attention_mask is not None and attention_mask.shape == labels.shape:
                given, labels = labels, labels.masked_fill(attention_mask == 0, -100)
                count = counted_of(labels, given, count, scores.dtype)
            loss = token_binary_cross_entropy(scores.squeeze(-1), labels, count)
            loss = loss if self.loss_weight is None else self.loss_weight * loss
        recorded = self.recorded(base, loss)
        return outputs.XFormerTokenClassifierOutput(
            loss=self.with_aux_losses(loss, base, share=step_share(labels, count)),
            logits=scores.squeeze(-1),
            **recorded,
        )
