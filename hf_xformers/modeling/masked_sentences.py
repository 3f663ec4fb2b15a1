# SPDX-License-Identifier: Apache-2.0
"""Masked sentences: an encoder's state of a sentence, from which a decoder writes what stood there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.outputs import TowerOutput
from ..ops.common.real_tokens import last_real
from .language import XFormerForSeq2SeqLM


class XFormerForMaskedSentences(XFormerForSeq2SeqLM):
    """An encoder-decoder that writes the masked sentences of a document, each from the state of its last token alone.

    p(w_k1 .. w_kn) = prod_j p(w_kj | w_k1 .. w_k(j-1), d_k) (Zhang, Wei and Zhou 2019, arXiv 1905.06566, section 3.2).
    A sentence is a row of the decoder; what stands in other sentences reaches it through d_k alone.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any | None = None,
        target_positions: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSeq2SeqLMOutput:
        """target_positions: [B, M], where the last tokens of the sentences that are to be written stand in the rows,
        -1 for none; [B] for one in each. Default: the last real token. labels, decoder_input_ids: [B, M, W] ids of
        these sentences (labels -100 where there is no target), or [B, W] where M is 1. logits: [B, M, W, V] or
        [B, W, V]."""
        text = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": kwargs.pop("position_ids", None),
            "inputs_embeds": inputs_embeds,
        }
        of_decoder = ("past_key_values", "cache", "use_cache")
        further = {name: value for name, value in kwargs.items() if name not in of_decoder}
        encoded = self.model._encoded(encoder_outputs, text, further)
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is None:
            if input_ids is None:  # the first word of each
                decoder_input_ids = self.model.shift_right(encoded.last_hidden_state.new_zeros(1, 1).long())
                decoder_input_ids = decoder_input_ids.expand(encoded.last_hidden_state.shape[0], -1)
            else:
                decoder_input_ids, decoder_attention_mask = self.model._copied(
                    input_ids, attention_mask, decoder_attention_mask
                )
        vectors, real = self._vectors(encoded.last_hidden_state, attention_mask, target_positions)
        nested = next((x.shape[:2] for x in (labels, decoder_input_ids) if x is not None and x.ndim == 3), None)
        if nested is not None and nested != real.shape:
            raise ValueError(
                f"Labels or decoder inputs of {nested[1]} sentences in {nested[0]} rows do not belong to"
                f" `target_positions` {list(real.shape)}; give one place for each sentence (-1: none)."
            )
        tower = encoded if isinstance(encoded, TowerOutput) else None
        written = super().forward(
            attention_mask=real.flatten().unsqueeze(-1),
            decoder_input_ids=_flat(decoder_input_ids),
            decoder_attention_mask=_flat(decoder_attention_mask),
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=TowerOutput(
                last_hidden_state=vectors.flatten(0, 1).unsqueeze(1),
                padding_mask=real.flatten().unsqueeze(-1),
                hidden_states=encoded.hidden_states,
                attentions=encoded.attentions,
                aux_losses=None if tower is None else tower.aux_losses,
                log_probs=None if tower is None else tower.log_probs,
            ),
            labels=_flat(labels),
            return_dict=True,
            **{name: value for name, value in kwargs.items() if name not in self.model.trunk.extra_inputs},
        )
        written.encoder_last_hidden_state = encoded.last_hidden_state
        if nested is not None:
            written.logits = written.logits.unflatten(0, nested)
        return written

    @staticmethod
    def _vectors(states: Tensor, mask: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """States [B, T, D] at places [B, M] -> ([B, M, D], boolean [B, M]: which places there are)."""
        length = states.shape[1]
        if places is None:
            real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask != 0
            places = last_real(real)
        places = places.reshape(states.shape[0], -1)
        index = places.clamp(min=0, max=length - 1)
        vectors = states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        return vectors, (places >= 0) & (places < length)


def _flat(nested: Tensor | None) -> Tensor | None:
    """[B, M, ...] -> [B * M, ...]; what has two axes stays."""
    return nested.flatten(0, 1) if nested is not None and nested.ndim == 3 else nested
