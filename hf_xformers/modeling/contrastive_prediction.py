# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling and contrastive predictive coding of sentences at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.call import add_losses
from ..core.choices import token_rows
from ..core.components import bounded
from ..core.contrastive import Matches, info_nce, match
from ..core.distributed import sum_over_processes
from ..core.hand_overs import HandOver
from ..core.inputs import check_token_labels
from ..core.losses import step_share, token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .language_model import LanguageModel


@register_pretraining("contrastive_prediction")
class ContrastivePredictionSpec(PretrainingSpec):
    """weight: of the contrastive loss next to that of masked tokens."""

    summary = "masked tokens, and vectors of masked sentences told apart (CPC; ETC)"

    weight: float | int = bounded(1.0, least=0)


def told_apart(anchors: Tensor, candidates: Tensor, there: Tensor) -> Matches:
    """The scores s_ij = a_i b_j / sqrt(D) in float32, j over the candidates of all processes.

    anchors, candidates [N, D], there [N] boolean, of which the others are no candidates.
    """
    return match(anchors, candidates, there, scale=anchors.shape[-1] ** -0.5)


def contrastive_loss(found: Matches, there: Tensor) -> Tensor:
    """InfoNCE (nats), the mean over i of -s_ii + log sum_j exp(s_ij) (van den Oord, Li and Vinyals 2018, arXiv
    1807.03748, equation 4), i over those that are there [N]. 0 where there is none."""
    losses = info_nce(found.scores, found.own, there)
    total, count = sum_over_processes(torch.stack((losses.sum(), there.sum().to(losses.dtype))))
    return total / count.clamp(min=1)


class XFormerForContrastivePrediction(LanguageModel):
    """An encoder that predicts masked tokens, and what the global tokens of wholly masked sentences would be if they
    saw these sentences alone (Ainslie et al. 2020, arXiv 2004.08483, section 2.3).

    a_i is the last state of sentence i's global token where all tokens of the sentence are masked, b_i that of the
    global token of the sentence by itself: a text of its own, so that nothing of others reaches it. The auxiliary loss
    `cpc` is `weight` (of [`ContrastivePredictionSpec`]) times [`contrastive_loss`] of their scores ([`told_apart`]).

    Raises:
        ValueError: a stack without global tokens for sentences.
    """

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        if HandOver.SUMMARIES not in config.stack.gives:
            raise ValueError(
                f"{type(self).__name__} compares global tokens that stand for sentences, which stack"
                f" {config.stack.type!r} does not give. Use xf_etc."
            )
        super().__init__(config)
        self.settings = ContrastivePredictionSpec.of(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        masked_sentences: Tensor | None = None,
        sentence_input_ids: Tensor | None = None,
        sentence_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerContrastivePredictionOutput:
        """
        Args:
            labels: [B, T] as in masked LM.
            masked_sentences: [B, M], the numbers in each row (from 0, in the order of `sentence_ids`) of the sentences
                that are masked, -1 for none.
            sentence_input_ids, sentence_attention_mask: [B, M, W], what stands in them.

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
        loss, aux_losses = None, dict(base.aux_losses or {})
        if labels is not None:
            loss = token_cross_entropy(logits, labels, count)
        scores, targets = None, None
        if masked_sentences is not None and sentence_input_ids is not None:
            anchors, candidates, there, more = self.vectors(
                base.summaries, masked_sentences, sentence_input_ids, sentence_attention_mask
            )
            add_losses(aux_losses, more)
            found = told_apart(anchors, candidates, there)
            aux_losses["cpc"] = self.settings.weight * contrastive_loss(found, there)
            loss = aux_losses["cpc"].new_zeros(()) if loss is None else loss
            scores = found.scores.unflatten(0, masked_sentences.shape)
            targets = torch.where(there & found.wrong().any(-1), found.own, -100).view_as(masked_sentences)
        return outputs.XFormerContrastivePredictionOutput(
            loss=self.with_aux_losses(
                loss, base, partial(token_rows, logits, labels, count), aux_losses, step_share(labels, count)
            ),
            logits=logits,
            sentence_logits=scores,
            sentence_targets=targets,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )

    def vectors(
        self, summaries: Tensor, numbers: Tensor, ids: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor] | None]:
        """a and b [B * M, D] of sentences `numbers` [B, M] with ids [B, M, W], which of them there are, [B * M], and
        the auxiliary losses of the pass that reads them alone.

        Raises `ValueError` for sentences that do not belong to the numbers."""
        if ids.shape[:2] != numbers.shape:
            raise ValueError(
                f"`sentence_input_ids` {list(ids.shape)} do not belong to `masked_sentences` {list(numbers.shape)};"
                " give [batch, sentences, length] of as many sentences."
            )
        there = ((numbers >= 0) & (numbers < summaries.shape[1])).flatten()
        index = numbers.clamp(0, summaries.shape[1] - 1)[..., None].expand(-1, -1, summaries.shape[-1])
        flat = ids.flatten(0, 1)
        real = there[:, None].expand_as(flat) if mask is None else mask.flatten(0, 1)
        alone = self.model(input_ids=flat, attention_mask=real.long(), sentence_ids=torch.zeros_like(flat))
        return summaries.gather(1, index).flatten(0, 1), alone.summaries[:, 0], there, alone.aux_losses
