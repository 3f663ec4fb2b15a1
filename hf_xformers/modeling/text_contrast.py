# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts that are told apart from those of other texts."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.components import bounded
from ..core.contrastive import (
    Matches,
    absent,
    draw_answers,
    match,
    nce_loss,
    negative_sampling_loss,
    ranking_loss,
    softmax_loss,
)
from ..core.losses import per_target, step_share
from ..core.pooling import fitting, pool
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel


@register_pretraining("text_contrast")
class TextContrastSpec(PretrainingSpec):
    """
    Args:
        loss: `info_nce`, `ctl`, `ranking`, `nce` or `negative_sampling`.
        temperature: what cosines are divided by.
        margin: of `ranking`.
        noise_power: of how often a text stands in a batch, for texts that are drawn.
        gather_negatives: whether other processes' texts are wrong answers, too.
    """

    summary = "the other view of a text, among those of other texts"

    loss: Literal["info_nce", "ctl", "ranking", "nce", "negative_sampling"] = "info_nce"
    temperature: float | int = bounded(0.05, above=0)
    margin: float | int = 1.0
    noise_power: float | int = 0.75
    gather_negatives: bool = True


class XFormerForTextContrast(XFormerPreTrainedModel):
    """An encoder whose vectors of two views of a text are told apart from those of other texts.

    z = W v / |W v| with v the mean of the states (Giorgi et al. 2021, arXiv 2006.03659, section 3.1), unless
    `classifier_pooling` of the config is `first` or `last`; the score of views i and j is z_i z_j / temperature. The
    second views of other texts in the batch, on all processes, are the wrong answers: all of them, or those that
    `negative_draws` choose by the noise law. A text that is equal to one's own is none.
    """

    reads_pooler = False
    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config: XFormerConfig):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        self.settings = TextContrastSpec.of(config)
        self.model = XFormerModel(config, add_pooling_layer=self.reads_pooler)
        self.model.under_a_head = True
        self.projection = nn.Linear(self.model.vector_width, config.hidden_size)
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
        second_input_ids: Tensor | None = None,
        second_attention_mask: Tensor | None = None,
        text_keys: Tensor | None = None,
        negative_draws: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerTextContrastOutput:
        """
        Args:
            labels: [B], -100 for texts that are not to be told apart (they are wrong answers still), anything else for
                the others.
            second_input_ids, second_attention_mask: [B, T2], the second views, None: the first ones once more, with
                dropout of their own.
            text_keys: [B], whole numbers that are equal for equal texts.
            negative_draws: [B, k] numbers in [0, 1), which stand for k wrong answers each, None: all of the batch.
        """
        count = kwargs.pop("num_items_in_batch", None)
        inputs = {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        base = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs, **kwargs)
        vectors = self.vectors(base, attention_mask)
        loss, scores, targets = None, None, None
        if labels is not None:
            labels = labels.to(vectors.device).view(-1)
            if second_input_ids is None:
                again = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs, **kwargs)
                mask = attention_mask
            else:
                again = self.model(input_ids=second_input_ids, attention_mask=second_attention_mask, **kwargs)
                mask = second_attention_mask
            self.add_pass(base, again)
            there = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool().flatten(1).any(-1)
            found = match(
                vectors,
                self.vectors(again, mask),
                there,
                scale=1 / self.settings.temperature,
                keys=text_keys,
                gather=self.settings.gather_negatives,
            )
            wrong = found.wrong()
            asked = (labels != -100) & there & wrong.any(-1)
            losses = self.losses(found, wrong, negative_draws).masked_fill(~asked, 0.0)
            loss = per_target(losses.sum(), asked.sum() if count is None else count)
            answers = wrong.scatter(1, found.own[:, None], True)
            scores = found.scores.masked_fill(~answers, absent(found.scores.dtype))
            targets = torch.where(asked, found.own, -100)
        return outputs.XFormerTextContrastOutput(
            loss=self.with_aux_losses(loss, base, share=step_share(labels, count)),
            vectors=vectors,
            logits=scores,
            targets=targets,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
        )

    def vectors(self, base: Any, mask: Tensor | None) -> Tensor:
        """[B, D] of length 1."""
        states, how = base.last_hidden_state, self.config.classifier_pooling
        mask = fitting(mask, states, base.padding_mask)
        projected = self.projection(pool(states, mask, how if how in ("first", "last") else "mean"))
        wide = projected if projected.dtype == torch.float64 else projected.float()
        return F.normalize(wide, dim=-1)

    def losses(self, found: Matches, wrong: Tensor, draws: Tensor | None) -> Tensor:
        """[N], of texts whose wrong answers are `wrong` [N, M], of which `draws` [N, k] choose some."""
        name, scores = self.settings.loss, found.scores
        positive = scores.gather(1, found.own[:, None]).squeeze(1)
        law = found.law(self.settings.noise_power)
        # The logarithm of 0 is never read: such candidates are none.
        log_q = law.clamp(min=torch.finfo(law.dtype).tiny).log()
        negative = scores.masked_fill(~wrong, absent(scores.dtype))
        log_q_negative = log_q.expand_as(negative)
        if draws is None and name == "ctl":
            raise ValueError("Loss 'ctl' has one wrong answer for each text; give `negative_draws` [B, 1].")
        if draws is not None:
            chosen = draw_answers(law * wrong, draws.to(scores.device))
            negative, log_q_negative = negative.gather(1, chosen), log_q[chosen]
        if name == "ranking":
            return ranking_loss(positive, negative, self.settings.margin)
        if name == "nce":
            return nce_loss(positive, negative, log_q[found.own], log_q_negative)
        if name == "negative_sampling":
            return negative_sampling_loss(positive, negative)
        return softmax_loss(positive, negative)
