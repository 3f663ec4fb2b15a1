# SPDX-License-Identifier: Apache-2.0
"""Models that read sound."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.call import can_inspect
from ..core.losses import counted_of, per_target, step_share
from ..embedding.frames import halved
from ..modeling_base import XFormerPreTrainedModel, objects_for_heads
from ..modeling_xformer import XFormerModel
from ..ops.common.real_tokens import real_first
from ..ops.ctc_decoding import best_path, prefix_beam_search
from .label_layer import LabelLayer

# Logit of every label but the blank at padding: of probability 0 in float32, and a number in any precision.
NOTHING = -100.0


class XFormerSoundModel(XFormerModel):
    """The bare X-former of sound: hidden states of frames, four to a state, without a head."""

    main_input_name = "input_features"
    input_modalities = ["audio"]

    @objects_for_heads
    @can_return_tuple
    def forward(
        self, input_features: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> outputs.XFormerModelOutput:
        """
        Args:
            input_features: [B, T, F] of frames, as a feature extractor gives them.
            attention_mask: [B, T], 1 = a real frame. States [B, ceil(T / 4), D] begin with those of real frames,
                whichever side padding is on; the output's `padding_mask` says which are real.
        """
        if input_features is None:
            raise ValueError("Give `input_features` [batch, frames, features].")
        embeds, mask = self.trunk.embedding.read(input_features, attention_mask)
        kwargs["return_dict"] = True
        output = cast(Any, super().forward(inputs_embeds=embeds, attention_mask=mask, **kwargs))
        output.padding_mask = mask
        return output

    def _get_feature_vector_attention_mask(self, length: int, attention_mask: Tensor) -> Tensor:
        """Which of `length` states are of real frames, [B, length] boolean, as `SpeechEncoderDecoderModel` asks."""
        states = halved(halved((attention_mask != 0).sum(-1, keepdim=True)))
        return torch.arange(length, device=states.device) < states


class XFormerForCTC(XFormerPreTrainedModel):
    """Transcription of sound: a label or a blank for each state (connectionist temporal classification)."""

    main_input_name = "input_features"
    input_modalities = ["audio"]

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        blank = config.pad_token_id
        if blank is None or not 0 <= blank < config.vocab_size:
            raise ValueError(
                f"CTC needs a blank, which is `pad_token_id`, an id below `vocab_size` {config.vocab_size}, got"
                f" {blank}; set it to the tokenizer's padding token."
            )
        self.model = XFormerSoundModel(config, add_pooling_layer=False)
        self.model.under_a_head = True
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = LabelLayer(config.stack.output_width(config), config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerCTCOutput:
        """
        Args:
            input_features: [B, T, F] of frames, attention_mask: [B, T], 1 = a real frame.
            labels: [B, U] ids of the transcript; -100 and the blank are padding.
            num_items_in_batch: the loss is the sum over labels divided by this count (what Trainer gives), in place of
                `ctc_loss_reduction`.

        logits [B, ceil(T / 4), V], begin with those of real frames; of a state that is padding they say blank.

        Raises:
            ValueError: labels outside the vocabulary, or not a row for each sound.
        """
        base = self.model(input_features, attention_mask, **kwargs)
        logits = self.classifier(self.dropout(base.last_hidden_state))
        mask = base.padding_mask
        if mask is not None:
            is_blank = torch.arange(logits.shape[-1], device=logits.device) == self.config.pad_token_id
            nothing = torch.zeros_like(logits[:1, :1]).masked_fill(~is_blank, NOTHING)
            logits = torch.where(mask[..., None], logits, nothing)
        loss = None
        if labels is not None:
            given, labels = labels, labels.masked_fill(labels == self.config.pad_token_id, -100)
            num_items_in_batch = counted_of(labels, given, num_items_in_batch, logits.dtype)
            loss = self.ctc_loss(logits, mask, labels, num_items_in_batch)
        return outputs.XFormerCTCOutput(
            loss=self.with_aux_losses(loss, base, share=step_share(labels, num_items_in_batch)),
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            frame_mask=mask,
        )

    def ctc_loss(
        self, logits: Tensor, mask: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """-log of the labels' probability over all their paths (Graves et al. 2006, eqs. 2 to 8), in float32 at least:
        logits [B, T, V], mask [B, T] boolean with real states first, labels [B, U], -100 where there is none."""
        blank, vocabulary = self.config.pad_token_id, logits.shape[-1]
        labels = labels.to(logits.device)
        if labels.ndim != 2 or labels.shape[0] != logits.shape[0]:
            raise ValueError(f"`labels` must be [batch = {logits.shape[0]}, labels], got {list(labels.shape)}.")
        known = labels != -100
        if can_inspect() and bool((known & ((labels < 0) | (labels >= vocabulary))).any()):
            wrong = int(labels[known & ((labels < 0) | (labels >= vocabulary))][0])
            raise ValueError(
                f"`labels` has the id {wrong}, and the vocabulary has those from 0 to {vocabulary - 1}; take the"
                " tokenizer that the model was made for."
            )
        lengths = known.sum(-1)
        frames = torch.full_like(lengths, logits.shape[1]) if mask is None else mask.sum(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probs = nn.functional.log_softmax(logits, dim=-1, dtype=wide).transpose(0, 1)
        # Labels to the front of their rows; what follows is not read, but has to be an id.
        targets = labels.masked_fill(~known, 0 if blank else 1 % vocabulary).gather(1, real_first(known))
        with torch.backends.cudnn.flags(enabled=False):  # which needs other shapes and is not exact in padding
            by_row = nn.functional.ctc_loss(
                log_probs,
                targets,
                frames.clamp(min=1),
                lengths,
                blank=blank,
                reduction="none",
                zero_infinity=self.config.ctc_zero_infinity,
            )
        by_row = by_row.masked_fill(frames == 0, 0.0)  # a row of padding alone
        if num_items_in_batch is not None:
            return per_target(by_row.sum(), num_items_in_batch)
        if self.config.ctc_loss_reduction == "sum":
            return by_row.sum()
        return (by_row / lengths.clamp(min=1)).mean()

    @torch.no_grad()
    def transcribe(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        *,
        num_beams: int = 1,
        **kwargs: Any,
    ) -> list[list[int]]:
        """The labels of each row, for `tokenizer.decode(labels, group_tokens=False)`: of the best path, or with
        several beams of the text with the most probability over all paths
        (`hf_xformers.ops.ctc_decoding.prefix_beam_search`).

        Raises:
            ValueError: less than one beam.
        """
        if num_beams < 1:
            raise ValueError(f"`num_beams` must be at least 1, got {num_beams}.")
        output = self(input_features, attention_mask, **kwargs)
        logits, mask, blank = output.logits, output.frame_mask, self.config.pad_token_id
        if num_beams == 1:
            return best_path(logits, mask, blank)
        log_probs = nn.functional.log_softmax(logits.double(), dim=-1).cpu()
        counts = [logits.shape[1]] * logits.shape[0] if mask is None else mask.sum(-1).tolist()
        return [prefix_beam_search(row[:count], num_beams, blank)[0][0] for row, count in zip(log_probs, counts)]
