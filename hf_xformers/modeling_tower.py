# SPDX-License-Identifier: Apache-2.0
"""One tower: embedding, position, layers and final norm, and the context that a call of it starts with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import logging

from .attention.shared.base import Attention
from .blocks.base import XFormerLayer
from .compat import CACHE, assert_async, capture_outputs, merge_with_config_defaults, one_cache, runs_again
from .configuration_xformer import XFormerConfig
from .core.cache import decoder_cache, make_cache, self_attention_layers, use_declared_layers
from .core.call import (
    Call,
    Extent,
    can_inspect,
    check_axes,
    document_numbers,
    extent_of,
    read_masks,
    segments_from_positions,
    self_attention_cache,
    token_positions,
)
from .core.call_features import features_of
from .core.call_readers import reader_of_call
from .core.components import refuse_unpadding, why_no_packing
from .core.holes import Moves, make_ready, movable, moves_of_call, settle
from .core.outputs import TowerOutput
from .core.precision import Float32Module
from .core.sharing import built_layers, is_shared, map_of, share_parts, shares_parts
from .modeling_base import XFormerPreTrainedModel
from .normalization.base import norm_inputs
from .ops.common.real_tokens import places_behind
from .position.base import Position, PositionActs, ScoreBias
from .stacks.driver import Pass

logger = logging.get_logger(__name__)


class XFormerTower(XFormerPreTrainedModel):
    """Embedding, position, layers and final norm: an encoder, a decoder-only model, or one side of an
    encoder-decoder."""

    def __init__(self, config: XFormerConfig, *, cross: bool = False):
        super().__init__(config)
        self.cross = cross
        # Where norms, residuals and heads differ by layer, what stands before the layers goes by the first, and what
        # follows by the last.
        first, last = config.layer(0), config.layer(max(config.num_hidden_layers - 1, 0))
        self.embedding = config.embedding.build(first)
        self.position = _checked(config.position.build(first), config)
        self.layers = nn.ModuleList(
            config.block.build(config.layer(index), layer_idx=index, cross=cross)
            for index in range(built_layers(config))
        )
        share_parts(config, cast("Sequence[XFormerLayer]", self.layers))
        for module in self.layers.modules():
            if isinstance(module, Attention):  # back-ends ask the tower's config, not one layer's view, for their name
                module.config = config
        self.stack = config.stack.build(config)
        self.final_norm, self.final_normalization = last.residual.build_final(last), last.normalization
        self._read_capabilities()
        self.types_were_read = False
        self.reads_tokens_alone = False  # whether the head on this tower does
        self.gradient_checkpointing = False
        self.post_init()

    def _read_capabilities(self) -> None:
        """Caches the capabilities of the components."""
        config, layers = cast(XFormerConfig, self.config), self.config.layer_configs()
        self.max_length = config.position.max_length(config)
        self.features = features_of(config)
        self.extra_inputs = self.names_of_inputs(config)
        self.embedding_inputs = tuple(config.embedding.inputs)
        self.drops_slots = config.is_decoder and not all(map(movable, self_attention_layers(config)))
        self.repeats_layers = is_shared(config) and not shares_parts(config)
        carry = layers[-1].attention.carries(layers[-1]) if config.add_pooler else None
        self.text_state = carry.kind if carry is not None and carry.reach == "pooler" else None
        # Whether padding behind a text has its places: ColBERT reads what becomes of it.
        by_length = any(layer.position.turns_by_length(layer.attention.angles) for layer in layers)
        self.counts_on = not (config.is_decoder or by_length)
        self.takes_pairs = all("pair_mask" in layer.attention.supports and not layer.block.mixes for layer in layers)
        self.why_no_packing = why_no_packing(layers)

    def layers_by_depth(self) -> Sequence[XFormerLayer]:
        """The layers as the stack is given them: one may run at several depths (`core/sharing.py`)."""
        if not self.repeats_layers:
            # Where an engine divides a model by layers, those of other processes are placeholders.
            return [layer for layer in cast("Sequence[XFormerLayer]", self.layers) if hasattr(layer, "prepare")]
        return [cast(XFormerLayer, self.layers[index]) for index in map_of(self.config)]

    def own_layers(self) -> Iterable[nn.Module]:
        return self.layers

    @staticmethod
    def names_of_inputs(config: XFormerConfig) -> tuple[str, ...]:
        """The further inputs that any component of this tower reads."""
        layers = config.layer_configs()
        specs = [
            config.stack,
            config.embedding,
            config.position,
            *(spec for entry in layers for spec in (entry.attention, entry.feedforward)),
        ]
        return tuple(dict.fromkeys(name for spec in specs for name in spec.inputs))

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        # The model around it names a tower's parts.
        self._tp_plan, self._ep_plan, self._pp_plan, self._fsdp_plan = {}, {}, {}, {}

    @property
    def recomputes(self) -> bool:
        """Whether layers run a second time for the gradient, when they would write to a cache again."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        return self.gradient_checkpointing or any(map(runs_again, self.layers))

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self.embedding, "tokens", self.embedding)  # an engine may have put a placeholder there

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> TowerOutput:
        """input_ids [B, T] or inputs_embeds [B, T, D]; attention_mask [B, cached + T], 1 = real (or a prepared
        [B, 1, T, S] mask, for mechanisms with explicit scores); encoder_hidden_states [B, M, D], or one memory for
        each execution step [B, steps, M, D]; past_key_values or, by its other name, cache."""
        past_key_values = one_cache(past_key_values, cache)
        if past_key_values is not None and self.recomputes:
            if cast(Cache, self_attention_cache(past_key_values)).get_seq_length():
                raise ValueError(
                    "Activation checkpointing runs layers twice, so that tokens in a cache (the prefix of peft's"
                    " prefix tuning, say) cannot be read; call `gradient_checkpointing_disable()`."
                )
            logger.warning_once("A cache is left out under activation checkpointing, where layers run twice.")
            past_key_values = None
        if past_key_values is not None:
            use_declared_layers(cast(Cache, self_attention_cache(past_key_values)), self.config)
        kwargs.setdefault("return_dict", True)  # the model around it makes tuples
        kwargs.update(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        others = {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
        }
        moved = self._moves(kwargs, attention_mask, past_key_values, use_cache)
        if moved is None:
            return self._read(attention_mask=attention_mask, **kwargs, **others)
        kwargs.pop("logits_to_keep", None)  # the caller's last tokens may stand elsewhere
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            make_ready(cache, moved)
        output = self._read(attention_mask=moved.mask, **moved.given(kwargs), **others)
        moved.restore(output)
        cache = self_attention_cache(getattr(output, CACHE)) if cache is None else cache
        if cache is not None:
            settle(cache, moved)
        return output

    def _moves(
        self, given: Mapping[str, Any], mask: Tensor | None, past_key_values: Cache | None, use_cache: bool | None
    ) -> Moves | None:
        """Where padding goes that stands between tokens, or before those of a stack that wants it behind
        (`core/holes.py`). A graph that is being recorded cannot ask for holes, and what describes pairs of tokens
        or watches them keeps their places."""
        cache = self_attention_cache(past_key_values)
        tokens = given["inputs_embeds"] if given["input_ids"] is None else given["input_ids"]
        if mask is None or tokens is None or reader_of_call(cache) is not None:
            return None
        for feature in self.features:
            if (moved := feature.moves(mask, tokens)) is not None:
                return moved
        if not can_inspect():
            return None
        keeps = self.config.use_cache if use_cache is None else use_cache
        fills = cache is not None or (self.config.is_decoder and keeps and not self.training)
        others = (given.get(name) for name in self.extra_inputs if name not in self.embedding_inputs)
        of_pairs = any(isinstance(one, Tensor) and one.ndim > 2 and one.shape[1] == tokens.shape[1] for one in others)
        if of_pairs or (not fills and given.get("exit_watch") is not None):
            return None
        return moves_of_call(mask, tokens, cache, drops_slots=fills and self.drops_slots)

    @merge_with_config_defaults
    @capture_outputs
    def _read(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> TowerOutput:
        """[`XFormerTower.forward`] of rows without padding between their tokens."""
        if kwargs.get("is_causal") is False and self.config.is_decoder:  # of the call, or else of the config
            raise ValueError(
                "`is_causal=False` was given to a decoder, which reads both ways only if it is built so; load it with"
                " `is_decoder=False`, such as `AutoModel.from_pretrained(..., is_decoder=False)`."
            )
        inputs_embeds = self._token_vectors(input_ids, inputs_embeds)
        given_cache = past_key_values is not None
        reader = reader_of_call(past_key_values)
        keeps_cache = reader is None or reader.keeps_cache(given_cache)
        if not keeps_cache or (not self.config.is_decoder and not given_cache) or self.recomputes:
            use_cache = False
        if use_cache and not given_cache:
            make = make_cache if encoder_hidden_states is None else decoder_cache
            past_key_values = make(self.config)
        states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        context = self.make_context(
            inputs_embeds,
            attention_mask,
            position_ids,
            self_attention_cache(past_key_values),
            encoder_attention_mask,
            output_attentions=bool(kwargs.get("output_attentions", self.config.output_attentions)),
            output_hidden_states=states is not None and states is not False,  # an index is allowed, and 0 is not False
            back_end=kwargs.get("back_end"),
        )
        if context.segment_ids is not None and past_key_values is not None and can_inspect():
            if given_cache:
                raise ValueError(
                    "`position_ids` restart inside a row (packed documents), but a cache continues one text per row;"
                    " leave `past_key_values` out, or give an `attention_mask` to say that rows are not packed."
                )
            past_key_values, use_cache = None, False  # nothing could continue from a row of several texts
        if self.extra_inputs:
            given = {**kwargs, "input_ids": input_ids, "token_type_ids": token_type_ids}
            context.inputs = {name: given[name] for name in self.extra_inputs if given.get(name) is not None}
        if isinstance(kwargs.get("logits_to_keep"), int):
            context.logits_to_keep = kwargs["logits_to_keep"]
        hidden_states = self.embedded(inputs_embeds, token_type_ids, context)
        if past_key_values is None and self.config.unpad_inputs and context.padding_mask is not None:
            refuse_unpadding(self.config)  # it may have been switched on after the config was checked
            context.leave_padding_out()
        for feature in self.features:
            feature.enter(context, self)
        self.position.share(context, hidden_states)
        run = (self.layers_by_depth(), hidden_states, context, self.position, encoder_hidden_states, past_key_values)
        result = self.stack(Pass(*run))
        hidden_states, memories, summaries = result.hidden_states, result.memories, result.summaries
        if self.final_norm is not None:
            spec = self.final_normalization
            given = norm_inputs(spec, result.context) if spec.over_tokens else {}
            hidden_states = self.final_norm(hidden_states, **given)
            if memories is not None:  # one for each layer of a decoder, of the same tokens
                of_each = {
                    name: x if x is None else x[:, None].expand(memories.shape[:3]) for name, x in given.items()
                }
                memories = self.final_norm(memories, **of_each)
            summaries = None if summaries is None else self.final_norm(summaries)
        further: dict[str, Any] = {}
        for feature in self.features:
            further |= feature.leave(result)
        return TowerOutput(
            last_hidden_state=hidden_states,
            **cast(Any, {CACHE: past_key_values if use_cache else None}),
            padding_mask=result.context.padding_mask,
            aux_losses=result.aux_losses or None,
            memories=memories,
            summaries=summaries,
            segment_memory=result.segment_memory,
            text_state=result.states.get((self.text_state, None)),
            **further,
        )

    def _token_vectors(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """[B, T, D] of the tokens, looked up or as given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        check_axes("input_ids", input_ids)
        check_axes("inputs_embeds", inputs_embeds, ("batch", "length", "width"))
        return self.embedding.lookup(input_ids) if inputs_embeds is None else inputs_embeds

    def embedded(self, inputs_embeds: Tensor, token_type_ids: Tensor | None, context: Call) -> Tensor:
        """[B, T, D]: what the layers start from."""
        if token_type_ids is not None and self.config.type_vocab_size < 2:
            if "token_type_ids" not in self.extra_inputs:
                self.leave_out(token_type_ids)
            token_type_ids = None
        given = {name: context.inputs[name] for name in self.embedding_inputs if name in context.inputs}
        embedding, position = self.embedding, PositionActs(self.position)
        hidden_states = embedding(inputs_embeds, token_type_ids, context.positions, position, **given)
        return hidden_states.to(self.dtype) if isinstance(embedding, Float32Module) else hidden_states

    def make_context(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        encoder_attention_mask: Tensor | None = None,
        **asked: Any,
    ) -> Call:
        """The state bundle of a call on inputs_embeds [B, T, D]. asked: what [`XFormerTower.read_rows`] takes besides.

        Raises:
            ValueError: masks, lengths or positions that do not fit.
        """
        reader = reader_of_call(cache)
        if reader is None:
            asked["cache"] = cache
        read = self.read_rows if reader is None else partial(reader.read, self)
        return read(
            inputs_embeds, attention_mask, position_ids, encoder_attention_mask=encoder_attention_mask, **asked
        )

    def read_rows(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        back_end: dict[str, Any] | None = None,
    ) -> Call:
        """The same where rows are texts."""
        position_ids = self.from_zero(position_ids)
        extent = extent_of(inputs_embeds, cache)
        current = extent.query_index()
        padding, explicit = read_masks(attention_mask, extent, self.takes_pairs)
        positions = token_positions(position_ids, padding, current)
        chosen = position_ids if attention_mask is None else None  # positions that may say where documents begin
        segments = None
        if chosen is not None and not back_end:
            segments = self._documents(positions.expand(extent.batch, -1), extent.fresh)
        for feature in self.features:
            positions = feature.positions(positions)
        asked = chosen is not None and (extent.fresh or extent.device.type == "cpu")
        if self.max_length is not None and (asked or extent.exceeds(self.max_length)):
            self.check_length(positions)
        if padding is not None and position_ids is None and extent.fresh and self.counts_on:
            counted, last = positions + places_behind(padding), self.max_length or self.config.max_position_embeddings
            positions = torch.maximum(positions, counted.clamp(max=last - 1))
        return Call(
            padding_mask=padding,
            positions=positions,
            query_index=current,
            key_index=extent.key_index(),
            causal=self.config.is_decoder,
            fresh=extent.fresh,
            static=extent.static,
            explicit_mask=explicit,
            segment_ids=segments,
            memory_padding_mask=None if encoder_attention_mask is None else encoder_attention_mask.bool(),
            implementation=self._back_end(extent, explicit, segments),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            inputs_embeds=inputs_embeds,
            position_ids=chosen,
            back_end=back_end or {},
        )

    def _back_end(self, extent: Extent, explicit: Tensor | None, segments: Tensor | None) -> str:
        """The attention back-end of a call. FlashAttention knows of order and padding alone, and of documents in a
        single row: SDPA has the rest."""
        name: str = self.config._attn_implementation or "eager"
        packed = segments is not None and extent.batch > 1
        more = packed or explicit is not None or extent.static or "score_bias" in self.config.position.acts
        return "sdpa" if more and "flash" in name else name

    def from_zero(self, position_ids: Tensor | None) -> Tensor | None:
        """The caller's positions, counted from 0."""
        first = self.config.first_position
        return position_ids - first if position_ids is not None and first else position_ids

    def _documents(self, positions: Tensor, fresh: bool) -> Tensor | None:
        """[B, T] document numbers of rows whose positions [B, T] restart; None where none does."""
        if can_inspect():
            segments = segments_from_positions(positions)
            if segments is not None and self.why_no_packing:
                raise ValueError(self.why_no_packing)
            return segments
        # A graph cannot ask whether there are several.
        if self.why_no_packing is None:
            return document_numbers(positions) if fresh else None
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            assert_async((positions[:, 1:] == positions[:, :-1] + 1).all(), self.why_no_packing)
        return None

    def leave_out(self, token_type_ids: Tensor) -> None:
        """What a model of one type or none (RoBERTa's, Longformer's) makes of types: nothing, as most tokenizers give
        them whether a model reads them or not. Types that differ are reported once, with the first call (later ones
        are not worth waiting for the device)."""
        if self.types_were_read or not can_inspect():
            return
        self.types_were_read = True
        if bool(token_type_ids.any()):
            logger.warning(
                f"`token_type_ids` are left out: this model has `type_vocab_size={self.config.type_vocab_size}` and"
                " cannot tell a second text from the first by them; build it with `type_vocab_size=2` if it shall."
            )

    def check_length(self, positions: Tensor) -> None:
        """Refuses positions beyond the last. Called only where it can fail, as reading the largest one waits for the
        device: for rows longer than what positions exist for (padding may still make them fit), and for positions that
        the caller chose, which off the processor are looked at where a text begins."""
        if self.max_length is None or not can_inspect():
            return
        longest = int(positions.max()) + 1
        if longest > self.max_length:
            raise ValueError(
                f"The sequence has {longest} tokens, but position {self.config.position.type!r} of this model covers "
                f"{self.max_length} (`max_position_embeddings`); shorten it, or build the model with a larger "
                "`max_position_embeddings` or a position that extrapolates ('rotary', 'sinusoidal_absolute', ...)."
            )


def _checked(position: Position, config: XFormerConfig) -> Position:
    """The position component as built, if it gives the bias that its spec declares."""
    if "score_bias" in config.position.acts and not isinstance(position.score_bias(), ScoreBias):
        raise TypeError(
            f"position {config.position.type!r} says that it adds a bias to scores, but its `score_bias()` gives a"
            f" {type(position.score_bias()).__name__}; give a `hf_xformers.position.base.ScoreBias`."
        )
    return position
