# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling, and which phrase was masked in a text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.call import add_losses
from ..core.choices import token_rows
from ..core.components import bounded
from ..core.contrastive import absent, info_nce, match
from ..core.distributed import sum_over_processes
from ..core.inputs import check_token_labels
from ..core.losses import step_share, token_cross_entropy
from ..core.pooling import pool
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .language_model import LanguageModel


@register_pretraining("phrase_contrast")
class PhraseContrastSpec(PretrainingSpec):
    """
    Args:
        temperature: what scores are divided by.
        contrast_weight: of the loss of phrases.
        masked_lm_weight: of the loss of masked tokens.
        gather_negatives: whether other processes' phrases are wrong answers, too.
    """

    summary = "masked tokens, and the phrase masked in a text, among those of others (InfoWord)"

    temperature: float | int = bounded(1.0, above=0)
    contrast_weight: float | int = 1.0
    masked_lm_weight: float | int = 1.0
    gather_negatives: bool = True


class XFormerForPhraseContrast(LanguageModel):
    """An encoder that predicts masked tokens, and finds the phrase that was masked in a text among those of others.

    loss = lambda_MLM L_MLM + lambda_DIM mean_i(-s_ii + log sum_j exp(s_ij)) with s_ij = g(x_i) g(y_j) / temperature
    (Kong et al. 2020, arXiv 1910.08350, equations 3 and 4, whose temperature is 1). g is the state of the first token,
    x_i a text whose phrase y_i is masked, y_j a phrase by itself; j runs over the phrases of the batch, on all
    processes. A phrase that is equal to y_i is no wrong answer. The second part is the auxiliary loss
    `phrase_contrast`.
    """

    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False))
        self.settings = PhraseContrastSpec.of(self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        phrase_input_ids: Tensor | None = None,
        phrase_attention_mask: Tensor | None = None,
        phrase_keys: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerPhraseContrastOutput:
        """
        Args:
            labels: [B, T] as in masked LM.
            phrase_input_ids, phrase_attention_mask: [B, W], the phrase that is masked in each text (a row of padding:
                none).
            phrase_keys: [B], whole numbers that are equal for equal phrases.

        Returns:
            logits: [B, T, V].
        """
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(base.last_hidden_state)
        check_token_labels(labels, logits)
        weight, aux_losses = float(self.settings.masked_lm_weight), dict(base.aux_losses or {})
        scores, targets = None, None
        if phrase_input_ids is not None:
            alone = self.model(input_ids=phrase_input_ids, attention_mask=phrase_attention_mask)
            add_losses(aux_losses, alone.aux_losses)
            scores, targets, contrast = self.contrast(
                pool(base.last_hidden_state, attention_mask, "first"),
                pool(alone.last_hidden_state, phrase_attention_mask, "first"),
                phrase_attention_mask,
                phrase_keys,
            )
            aux_losses["phrase_contrast"] = self.settings.contrast_weight * contrast
        loss = None if labels is None else weight * token_cross_entropy(logits, labels, count)
        rows = partial(token_rows, logits, labels, count) if weight == 1 else None
        return outputs.XFormerPhraseContrastOutput(
            loss=self.with_aux_losses(loss, base, rows, aux_losses, step_share(labels, count)),
            logits=logits,
            phrase_logits=scores,
            phrase_targets=targets,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )

    def contrast(
        self, texts: Tensor, phrases: Tensor, mask: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(scores [B, M], which of them is each text's own phrase [B], -100 for none, the mean loss) of vectors
        [B, D]."""
        there = texts.new_ones(len(texts), dtype=torch.bool) if mask is None else mask.bool().any(-1)
        scale = 1 / self.settings.temperature
        found = match(texts, phrases, there, scale=scale, keys=keys, gather=self.settings.gather_negatives)
        wrong = found.wrong()
        asked = there & wrong.any(-1)
        scores = found.scores.masked_fill(~wrong.scatter(1, found.own[:, None], True), absent(found.scores.dtype))
        losses = info_nce(scores, found.own, asked)
        total, number = sum_over_processes(torch.stack((losses.sum(), asked.sum().to(losses.dtype))))
        return scores, torch.where(asked, found.own, -100), total / number.clamp(min=1)
