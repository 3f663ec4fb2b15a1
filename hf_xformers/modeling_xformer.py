# SPDX-License-Identifier: Apache-2.0
"""The configurable model: one or two towers built from a config's components."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from .compat import CACHE, one_cache
from .configuration_xformer import XFormerConfig
from .core.cache import decoder_cache
from .core.call import can_inspect, places_in_documents, segments_from_positions
from .core.choices import build_choice_loss, joint
from .core.hand_overs import HandOver
from .core.inputs import refuse_unread
from .core.outputs import TowerOutput, XFormerModelOutput, XFormerSeq2SeqModelOutput
from .core.pooling import MakesTextVector, Pooler, TextPooler, fitting
from .core.serving import taken_by_back_end
from .core.whole_modules import end_for
from .modeling_base import XFormerPreTrainedModel, objects_for_heads
from .modeling_tower import XFormerTower
from .ops.common.real_tokens import from_first_real, is_first_real, up_to_last_real


def build_pooler(config: XFormerConfig) -> TextPooler:
    """What makes a text's vector: the stack's own, that of the last layer's attention, or the usual one."""
    last = config.layer(max(config.num_hidden_layers - 1, 0))
    for spec, view in ((config.stack, config), (last.attention, last)):
        pooler = spec.build_pooler(view) if isinstance(spec, MakesTextVector) else None
        if pooler is not None:
            return pooler
    return Pooler(config)


class XFormerModel(XFormerPreTrainedModel):
    """The bare X-former: hidden states without a head.

    `trunk` is the only tower of an encoder or a decoder-only model, and the encoder of an encoder-decoder, whose
    second tower is `decoder`.
    """

    def __init__(self, config: XFormerConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        for view in config.tower_configs():  # fields may have been set since the configuration was made
            view.check_layers()
        reads = config.is_decoder and getattr(config, "add_cross_attention", False)  # as in transformers' decoders
        self.trunk = XFormerTower(config.tower("trunk") if config.is_encoder_decoder else config, cross=reads)
        self.decoder = XFormerTower(config.tower("decoder"), cross=True) if config.is_encoder_decoder else None
        pooled = add_pooling_layer and config.add_pooler and not config.is_encoder_decoder
        self.pooler = build_pooler(config) if pooled else None
        views = [view.layer(index) for view in config.tower_configs() for index in range(view.num_hidden_layers)]
        self.choice_loss = build_choice_loss(view.attention for view in views)
        self._tied_weights_keys = self.shared_tables() or None  # type: ignore[assignment]
        self.post_init()

    @property
    def vector_width(self) -> int:
        """Width of the vectors that a classifier reads: the pooler's, or the last states'."""
        return self.config.stack.output_width(self.config) if self.pooler is None else self.config.hidden_size

    def shared_tables(self) -> dict[str, str]:
        """The towers of an encoder-decoder read one token table, tied to the output or not, unless the config says
        otherwise."""
        if self.decoder is None or not self.config.shares_token_table:
            return {}
        names = self.config.embedding.tables(self.config)
        return {f"decoder.embedding.{name}": f"trunk.embedding.{name}" for name in names}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return self.shared_tables()

    def get_input_embeddings(self) -> Any:
        return end_for(self, self.trunk.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.trunk.set_input_embeddings(value)
        if self.decoder is not None and self.config.shares_token_table:
            self.decoder.set_input_embeddings(value)

    @property
    def embed_tokens(self) -> Any:
        """The token table by Llama's name, which trl and models of images and text ask for."""
        return self.get_input_embeddings()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "embed_tokens":  # transformers changes the table where it finds that name
            return self.set_input_embeddings(value)
        super().__setattr__(name, value)

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        (self._tp_plan or {}).pop("embed_tokens", None)  # a second name of the table, which has a rule of its own

    def further_inputs(self) -> tuple[str, ...]:
        """Names of inputs besides those that `forward` names, which components of this model read."""
        decoder = () if self.decoder is None else self.decoder.extra_inputs
        pooler = () if self.pooler is None else tuple(self.pooler.inputs)
        memory = ("encoder_hidden_states", "encoder_attention_mask") if self.trunk.cross else ()
        return (*self.trunk.extra_inputs, *decoder, *pooler, *memory)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        # transformers asks for encoders of images and of sound, and goes by the answer that there is another model.
        return self.trunk if modality in (None, self.config.modality) else self

    def get_decoder(self) -> nn.Module:
        return self.trunk if self.decoder is None else self.decoder

    def set_encoder(self, encoder: nn.Module, modality: str | None = None) -> None:
        self.trunk = cast(XFormerTower, encoder)

    def set_decoder(self, decoder: nn.Module) -> None:
        setattr(self, "trunk" if self.decoder is None else "decoder", decoder)

    @objects_for_heads
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        decoder_position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> XFormerModelOutput | XFormerSeq2SeqModelOutput:
        """
        Args:
            input_ids: [B, T] token ids, or inputs_embeds [B, T, D] in their place.
            attention_mask: [B, T], 1 = real token. With a cache: of the cached and the new tokens.
            token_type_ids: [B, T], 0 <= id < type_vocab_size; a model of one type or none leaves them out.
            position_ids: [B, T]; default: real tokens counted from the config's `first_position`, 0 in most models. In
                an encoder-decoder those of the encoder's text.
            decoder_position_ids: [B, T] or [T] of the decoder's tokens, where these do not stand at the beginning of
                their text; default: real tokens counted from 0.
            decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask: the same for an encoder-decoder's decoder
                (default: `input_ids` shifted right, padded alike).
            encoder_outputs: an earlier call's encoder outputs, to skip the encoder.
            past_key_values (or cache, its other name), use_cache: generation cache.

        Raises:
            TypeError: a keyword argument that no component of this model reads.
            ValueError: inputs of a decoder that this model does not have, or inputs that do not fit each other.
        """
        back_end: dict[str, Any] = {}
        if kwargs:
            back_end = taken_by_back_end(self.config, kwargs, self.further_inputs())
            refuse_unread(self.config.model_type, kwargs, self.further_inputs(), _NAMED_INPUTS)
        ends = kwargs.get("cu_seq_lens_q")  # of documents in one row, which collators may say instead of positions
        if ends is not None and position_ids is None and attention_mask is None:
            tokens = cast(Tensor, inputs_embeds if input_ids is None else input_ids)
            position_ids = self.config.first_position + places_in_documents(ends, tokens.shape[1])
        text = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        generation = {"past_key_values": one_cache(past_key_values, cache), "use_cache": use_cache}
        if self.decoder is None:
            for name, value in (
                ("decoder_input_ids", decoder_input_ids),
                ("decoder_attention_mask", decoder_attention_mask),
                ("decoder_inputs_embeds", decoder_inputs_embeds),
                ("decoder_position_ids", decoder_position_ids),
            ):
                if value is not None:
                    raise ValueError(f"`{name}` was given to a model without a second tower; leave it out.")
            if back_end:
                kwargs["back_end"] = back_end
            return self._one_tower(text, **generation, **kwargs)
        encoded = self._encoded(encoder_outputs, text, kwargs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids, decoder_attention_mask = self._copied(input_ids, attention_mask, decoder_attention_mask)
        written = {
            "input_ids": decoder_input_ids,
            "attention_mask": decoder_attention_mask,
            "position_ids": decoder_position_ids,
            "inputs_embeds": decoder_inputs_embeds,
        }
        for name in self.trunk.extra_inputs:  # they describe the encoder's text
            if name not in self.decoder.config.stack.inputs:
                kwargs.pop(name, None)
        return self._decoded(encoded, attention_mask, written, **generation, **kwargs)

    def _one_tower(self, text: dict[str, Any], **kwargs: Any) -> XFormerModelOutput:
        """The output of an encoder or a decoder-only model. text: the inputs that describe its tokens."""
        if self.pooler is not None and kwargs.get("past_key_values") is None:
            text = {**text, "attention_mask": self.real_tokens(text["input_ids"], text["attention_mask"])}
        output = self.trunk(**text, **kwargs)
        pooled = None
        if self.pooler is not None:
            given = {name: kwargs.get(name) for name in self.pooler.inputs}
            if self.pooler.state is not None:
                given["state"] = output.text_state
            states = output.last_hidden_state
            pooled = self.pooler(states, fitting(output.padding_mask, states), **given)
        tokens = text["inputs_embeds"] if text["input_ids"] is None else text["input_ids"]
        return XFormerModelOutput(
            last_hidden_state=output.last_hidden_state,
            pooler_output=pooled,
            **{CACHE: getattr(output, CACHE)},
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            cross_attentions=output.cross_attentions or None,
            aux_losses=self.reported(output.aux_losses),
            segment_memory=output.segment_memory,
            padding_mask=None if tokens.shape[1] == output.last_hidden_state.shape[1] else output.padding_mask,
            log_probs=output.log_probs,
            summaries=output.summaries,
        )

    def _encoded(
        self, given: Any | None, text: dict[str, Tensor | None], further: dict[str, Any]
    ) -> BaseModelOutput | TowerOutput:
        """The encoder's output, unless it is `given`. further: the remaining arguments of the call.

        Raises:
            ValueError: packed rows, or given outputs without the memories that the decoder reads.
        """
        if given is None:
            positions = text["position_ids"]
            if positions is not None and text["attention_mask"] is None and can_inspect():
                if segments_from_positions(positions if positions.ndim == 2 else positions[None]) is not None:
                    raise ValueError(
                        "`position_ids` restart inside a row (packed documents), but the decoder of an encoder-decoder"
                        " reads the whole row; give one document per row, or an `attention_mask` to say that rows are"
                        " not packed."
                    )
            given = self.trunk(**text, **further)
        elif isinstance(given, (tuple, list)):
            given = BaseModelOutput(*given)
        memories = given.memories if isinstance(given, TowerOutput) else None
        if memories is None and HandOver.MEMORIES in self.trunk.config.stack.gives:
            raise ValueError(
                f"With stack {self.trunk.config.stack.type!r} each decoder layer reads a memory of its own, which the"
                " given `encoder_outputs` lack; give the output object of this model's encoder, not its last state"
                " alone."
            )
        return given

    def _copied(
        self, input_ids: Tensor | None, mask: Tensor | None, decoder_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(ids, padding mask) for a decoder that is given no text: the encoder's, shifted right."""
        if input_ids is None:
            raise ValueError("An encoder-decoder given `inputs_embeds` needs `decoder_input_ids` as well.")
        if decoder_mask is None and mask is not None and mask.ndim == 2:
            # The copy is padded where the input is, starts at its first real token, and reads no padding between them.
            real, slots = mask != 0, torch.arange(mask.shape[1], device=mask.device)
            upto = torch.where(real, slots, 0).cummax(-1).values
            ids = self.shift_right(input_ids.gather(1, upto))
            return ids.masked_fill(is_first_real(real), self.config.decoder_start_token_id), mask
        return self.shift_right(input_ids), decoder_mask

    def _decoded(
        self,
        encoded: BaseModelOutput | TowerOutput,
        attention_mask: Tensor | None,
        text: dict[str, Tensor | None],
        past_key_values: Cache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> XFormerSeq2SeqModelOutput:
        """The output of both towers. attention_mask: of the encoder's text. text: the inputs that describe the
        decoder's tokens."""
        decoder = cast(XFormerTower, self.decoder)
        memories, mask, encoder_losses, chosen = None, None, None, None
        if isinstance(encoded, TowerOutput):  # what only a tower of this package says
            memories, mask, encoder_losses = encoded.memories, encoded.padding_mask, encoded.aux_losses
            chosen = encoded.log_probs
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            if not decoder.recomputes:
                past_key_values = decoder_cache(decoder.config)
        output = decoder(
            **text,
            encoder_hidden_states=encoded.last_hidden_state if memories is None else memories,
            encoder_attention_mask=attention_mask if mask is None else mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        both = [log_probs for log_probs in (chosen, output.log_probs) if log_probs is not None]
        losses = {f"encoder_{name}": loss for name, loss in (encoder_losses or {}).items()}
        losses.update({f"decoder_{name}": loss for name, loss in (output.aux_losses or {}).items()})
        return XFormerSeq2SeqModelOutput(
            last_hidden_state=output.last_hidden_state,
            **{CACHE: getattr(output, CACHE)},
            decoder_hidden_states=output.hidden_states,
            decoder_attentions=output.attentions,
            cross_attentions=output.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            aux_losses=self.reported(losses or None),
            log_probs=joint(both) if both else None,
            segment_memory=encoded.segment_memory if isinstance(encoded, TowerOutput) else None,
        )

    def shift_right(self, ids: Tensor) -> Tensor:
        """[B, T] ids (or labels, -100 read as padding) -> decoder inputs: the start token stands before the first id,
        wherever padding puts that.

        Raises `ValueError` where the config names no start token."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise ValueError("Set `decoder_start_token_id` (or `pad_token_id`) in the config to make decoder inputs.")
        shifted = torch.cat([ids.new_full((ids.shape[0], 1), start), ids[:, :-1]], dim=1)
        shifted = shifted.masked_fill(shifted == -100, start if pad is None else pad)
        return shifted.masked_fill(is_first_real(ids != -100), start)

    @staticmethod
    def read_from_labels(labels: Tensor) -> Tensor:
        """[B, T] labels -> boolean mask of the decoder inputs that [`shift_right`] makes of them: real from the first
        label (the start token stands there) to the last. Tokens after the last label have nothing to predict and
        are masked out."""
        labelled = labels != -100
        return from_first_real(labelled) & up_to_last_real(labelled)


_NAMED_INPUTS = tuple(inspect.signature(XFormerModel.forward).parameters)
