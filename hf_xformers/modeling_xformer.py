"""The configurable model: one or two towers built from a config's components."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention.shared.base import Attention
from .blocks.base import XFormerLayer
from .configuration_xformer import XFormerConfig
from .core.cache import make_cache
from .core.components import refuse_packing, refuse_unpadding
from .core.context import LayerContext, document_numbers, segments_from_positions, self_attention_cache
from .core.initialization import start_linear
from .core.inputs import check_axes, refuse_unread
from .core.outputs import TowerOutput, XFormerModelOutput, XFormerSeq2SeqModelOutput
from .core.parallel_plans import check_tensor_parallel, layers_apart
from .core.pooling import Pooler
from .core.precision import Float32Module, computing_dtype, float32_names
from .core.sequence_sharding import check_sharded_call, sharding_in_force, why_not_context_parallel
from .core.unpadding import Unpadding
from .core.weight_decay import declared_undecayed
from .normalization.residual import norm_inputs
from .position.base import ScoreBias

logger = logging.get_logger(__name__)


class XFormerPreTrainedModel(PreTrainedModel):
    """What every X-former class shares: how weights start, what can be recorded, which back-ends fit."""

    config_class = XFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["XFormerLayer"]  # of the class alone; a model knows the classes of its own layers
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    under_a_head = False
    reads_every_token: ClassVar[bool] = False  # whether a head predicts something for each token of its last tower
    _can_record_outputs = {
        "hidden_states": OutputRecorder(XFormerLayer, index=0),
        "attentions": OutputRecorder(Attention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: XFormerConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        if self.reads_every_token:
            last = config.tower_configs()[-1]
            if not last.stack.gives_every_token(last):
                raise ValueError(
                    f"{type(self).__name__} predicts something for every token, but stack {last.stack.type!r} ends"
                    " with fewer states than tokens here; let it come back to the length of the text, e.g."
                    ' `stack={"type": "funnel", "upsample": True}`.'
                )
        self.model_tags = ["hf_xformers", config.model_type]  # what `push_to_hub` writes into the model card

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config = self.config
        if isinstance(module, nn.Linear):
            start_linear(config, init, module)
        initialize = getattr(module, "initialize", None)
        if initialize is not None:  # a component knows its own start; it runs after its children's
            initialize(config, init)

    def _initialize_weights(self, module: nn.Module, *_: Any, **__: Any) -> None:
        # transformers leaves out every module without parameters of its own where a model's code is not its own, to
        # spare what was loaded. Those are the components here, and their starts spare it themselves: they go through
        # `init`.
        super()._initialize_weights(module)

    def post_init(self) -> None:
        super().post_init()
        # What Accelerate's FSDP wraps by name, which it must find.
        towers = [module for module in self.modules() if isinstance(module, XFormerTower)]
        layers = {type(layer).__name__ for tower in towers for layer in tower.layers}
        self._no_split_modules = layers if layers_apart(self.config) else set()
        self._keep_in_fp32_modules_strict = float32_names(self)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay must leave alone: what components declare ([`Undecayed`]), and the
        biases and norms that Trainer leaves out by itself. `XFormerTrainer` heeds all of it. A plain Trainer asks no
        model, so give it an optimizer whose groups do: `Trainer(..., optimizers=(optimizer, None))`."""
        names = declared_undecayed(self)
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                if name == "bias" or isinstance(module, nn.LayerNorm):
                    names.add(f"{prefix}.{name}")
        return names

    @property
    def supports_context_parallel(self) -> bool:
        """transformers' question whether each process may be given a part of every text."""
        return bool(super().supports_context_parallel) and not why_not_context_parallel(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The type that layers compute in; some parameters may be in float32 all the same ([`Float32Module`])."""
        found = computing_dtype(self)
        return super().dtype if found is None else found

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        check_tensor_parallel(self.config, distributed_config.tp_size)
        return super()._resolve_parallel_plans(distributed_config)

    def reported(self, aux_losses: dict[str, Tensor] | None, loss: Tensor | None = None) -> dict[str, Tensor] | None:
        """The auxiliary losses that an output gives: beside a loss, in training, and wherever gradients are recorded.
        An output for use alone has none: pipelines cut outputs into rows, which these losses are not made of. The base
        model under a head leaves that to the head."""
        needed = loss is not None or self.under_a_head or self.training or torch.is_grad_enabled()
        return aux_losses if needed else None

    @staticmethod
    def shaped(config: XFormerConfig, *, is_decoder: bool, is_encoder_decoder: bool) -> XFormerConfig:
        """`config` in the shape that a head needs; a copy when that changes anything, so the caller's stays as it
        is."""
        if config.is_decoder == is_decoder and config.is_encoder_decoder == is_encoder_decoder:
            return config
        fields = config.to_dict()
        for key in ("model_type", "transformers_version", "architectures"):
            fields.pop(key, None)
        fields.update(is_decoder=is_decoder, is_encoder_decoder=is_encoder_decoder)
        shaped = type(config)(**fields)
        shaped._attn_implementation_internal = config._attn_implementation
        shaped.name_or_path = config.name_or_path
        return shaped


class XFormerTower(XFormerPreTrainedModel):
    """Embedding, position, layers and final norm: an encoder, a decoder-only model, or one side of an
    encoder-decoder."""

    def __init__(self, config: XFormerConfig, *, cross: bool = False):
        super().__init__(config)
        self.cross = cross
        # Where norms and heads differ by layer, what stands before the layers goes by the first, and what follows by
        # the last.
        first, last = config.layer(0), config.layer(max(config.num_hidden_layers - 1, 0))
        self.embedding = config.embedding.build(first)
        self.position = config.position.build(first)
        if "score_bias" in config.position.acts and not isinstance(self.position.score_bias(), ScoreBias):
            raise TypeError(
                f"position {config.position.type!r} says that it adds a bias to scores, but its `score_bias()` gives a"
                f" {type(self.position.score_bias()).__name__}; give a `hf_xformers.position.base.ScoreBias`."
            )
        count = config.stack.num_layers(config)
        block = config.block
        self.layers = nn.ModuleList(
            block.build(config.layer(index), layer_idx=index, cross=cross) for index in range(count)
        )
        for module in self.layers.modules():
            if isinstance(module, Attention):  # back-ends ask the tower's config, not one layer's view, for their name
                module.config = config
        self.stack = config.stack.build(config)
        self.final_norm = config.residual.build_final(last)
        self.max_length = config.position.max_length(config)
        self.extra_inputs = self.names_of_inputs(config)
        layers = layer_configs(config)
        self.takes_pairs = all(layer.attention.explicit_mask for layer in layers)
        self.keeps_documents_apart = all(
            layer.attention.packed and layer.block.packed and layer.stack.packed for layer in layers
        )
        self.types_were_read = False
        self.reads_tokens_alone = False  # whether the head on this tower does
        self.gradient_checkpointing = False
        self.post_init()

    @staticmethod
    def names_of_inputs(config: XFormerConfig) -> tuple[str, ...]:
        """The further inputs that any component of this tower reads."""
        layers = layer_configs(config)
        specs = [
            config.stack,
            config.position,
            *(spec for entry in layers for spec in (entry.attention, entry.feedforward)),
        ]
        return tuple(dict.fromkeys(name for spec in specs for name in spec.inputs))

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        self._tp_plan, self._fsdp_plan = {}, {}  # the model around it names a tower's parts

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.tokens = value

    @merge_with_config_defaults
    @capture_outputs
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
        **kwargs: Any,
    ) -> TowerOutput:
        """input_ids [B, T] or inputs_embeds [B, T, D]; attention_mask [B, cached + T], 1 = real (or a prepared
        [B, 1, T, S] mask, for mechanisms with explicit scores); encoder_hidden_states [B, M, D], or one memory for
        each execution step [B, steps, M, D]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        check_axes("input_ids", input_ids)
        check_axes("inputs_embeds", inputs_embeds, ("batch", "length", "width"))
        if inputs_embeds is None:
            inputs_embeds = self.embedding.lookup(input_ids)
        wants_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        if not self.config.is_decoder and past_key_values is None:
            use_cache = False
        given_cache = past_key_values is not None
        if use_cache and not given_cache:
            past_key_values = make_cache(self.config)
        context = self.make_context(
            inputs_embeds,
            attention_mask,
            position_ids,
            self_attention_cache(past_key_values),
            encoder_attention_mask,
            output_attentions=bool(kwargs.get("output_attentions", self.config.output_attentions)),
            output_hidden_states=wants_states is not None
            and wants_states is not False,  # it may be a state's index, 0
        )
        if context.segment_ids is not None and past_key_values is not None and self._can_inspect():
            if given_cache:
                raise ValueError(
                    "`position_ids` restart inside a row (packed documents), but a cache continues one text per row;"
                    " leave `past_key_values` out, or give an `attention_mask` to say that rows are not packed."
                )
            past_key_values, use_cache = None, False  # nothing could go on from a row of several texts
        given = {**kwargs, "input_ids": input_ids}
        context.inputs = {name: given[name] for name in self.extra_inputs if given.get(name) is not None}
        if token_type_ids is not None and not self.config.type_vocab_size:
            token_type_ids = self.leave_out(token_type_ids)
        hidden_states = self.embedding(inputs_embeds, token_type_ids, context.positions, self.position)
        if isinstance(self.embedding, Float32Module):
            hidden_states = hidden_states.to(self.dtype)
        if self.config.unpad_inputs and context.padding_mask is not None and past_key_values is None:
            refuse_unpadding(self.config)  # it may have been switched on after the config was checked
            if self._can_inspect() and not (context.output_attentions or context.output_hidden_states):
                context.unpadding = Unpadding(context.padding_mask)
        rotation = self.position.rotation(context.positions, hidden_states)
        if rotation is not None:
            context.shared["rotation"] = rotation
        bias = self.position.score_bias()
        if bias is not None:
            context.shared["score_bias"] = bias
        result = self.stack(
            self.layers,
            hidden_states,
            context,
            position=self.position,
            memory=encoder_hidden_states,
            past_key_values=past_key_values,
        )
        hidden_states, memories = result.hidden_states, result.memories
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states, **norm_inputs(self.final_norm, result.context))
            memories = None if memories is None else self.final_norm(memories)
        return TowerOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            padding_mask=result.context.padding_mask,
            aux_losses=result.aux_losses or None,
            memories=memories,
            segment_memory=result.segment_memory,
        )

    def make_context(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        encoder_attention_mask: Tensor | None,
        output_attentions: bool,
        output_hidden_states: bool = False,
    ) -> LayerContext:
        """The state bundle of this call. Raises `ValueError` for masks and lengths that do not fit."""
        batch, length, device = *inputs_embeds.shape[:2], inputs_embeds.device
        past = cache.get_seq_length() if cache is not None else 0
        static = cache is not None and bool(cache.is_compileable)
        total = cache.get_mask_sizes(length, 0)[0] if static else past + length
        fresh = isinstance(past, int) and past == 0 and not static
        current = torch.arange(length, device=device) + past
        explicit, padding = None, None
        takes_pairs = self.takes_pairs
        if static and not takes_pairs and attention_mask is not None and attention_mask.ndim == 4:
            # `generate` makes one of the padding for every static cache: its last query sees all real tokens.
            last = attention_mask[:, 0, -1]
            attention_mask = last if last.dtype == torch.bool else last == 0
        if attention_mask is not None and attention_mask.ndim == 4:
            if not takes_pairs:
                raise ValueError(
                    "A prepared 4-D attention mask needs attention with explicit scores (e.g. 'dense'); give a "
                    "[batch, length] mask of real tokens instead."
                )
            explicit = attention_mask
        elif attention_mask is not None:
            if attention_mask.ndim != 2 or attention_mask.shape[0] != batch:
                raise ValueError(
                    f"`attention_mask` must be [batch, length] = [{batch}, {total}], got {list(attention_mask.shape)}."
                )
            padding = attention_mask.to(device=device, dtype=torch.bool)
            if padding.shape[1] == length and not static and past:
                # A mask of the new tokens alone: what is cached was real.
                padding = torch.cat([padding.new_ones(batch, past), padding], dim=1)
            elif static and padding.shape[1] < total:
                padding = nn.functional.pad(padding, (0, total - padding.shape[1]))
            if padding.shape[1] != total:
                raise ValueError(
                    f"`attention_mask` covers {attention_mask.shape[1]} tokens, but {past} cached and {length} new "
                    f"tokens make {total}."
                )
            if not static and self._can_inspect() and bool(padding.all()):
                padding = None  # nothing is padded: the kernels' fast paths take no mask
        if position_ids is not None:
            positions = position_ids if position_ids.ndim == 2 else position_ids[None]
        elif padding is not None:  # padding does not count, on whichever side it is
            positions = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, current]
        else:
            positions = current[None]
        if self.max_length is not None:
            long = isinstance(past, int) and past + length > self.max_length
            if long or (position_ids is not None and attention_mask is None):
                self._check_length(positions)
        segments = None
        check_sharded_call(
            self.config,
            reads_tokens_alone=self.reads_tokens_alone,
            places=position_ids is not None,
            padding=padding is not None or explicit is not None,
        )
        may_restart = position_ids is not None and attention_mask is None
        may_restart = may_restart and not sharding_in_force()  # there positions jump where a text was divided
        if may_restart and self._can_inspect():
            segments = segments_from_positions(positions.expand(batch, -1))
            if segments is not None:
                refuse_packing(self._layer_configs())
        elif may_restart and fresh and self.keeps_documents_apart:
            segments = document_numbers(positions.expand(batch, -1))  # a graph cannot ask whether there are several
        return LayerContext(
            padding_mask=padding,
            positions=positions,
            query_index=current,
            key_index=torch.arange(total, device=device),
            causal=self.config.is_decoder,
            fresh=fresh,
            static=static,
            explicit_mask=explicit,
            segment_ids=segments,
            memory_padding_mask=None if encoder_attention_mask is None else encoder_attention_mask.bool(),
            implementation=self.config._attn_implementation,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids if attention_mask is None else None,
        )

    def leave_out(self, token_type_ids: Tensor) -> None:
        """What a model without a type table makes of types: nothing, as most tokenizers give them whether a model
        reads them or not. Types that differ are reported once, with the first call (later ones are not worth waiting
        for the device)."""
        if self.types_were_read or not self._can_inspect():
            return
        self.types_were_read = True
        if bool(token_type_ids.any()):
            logger.warning(
                "`token_type_ids` are left out: this model has `type_vocab_size=0` and cannot tell a second text from"
                " the first by them; build it with `type_vocab_size=2` if it shall."
            )

    @staticmethod
    def _can_inspect() -> bool:
        """Whether values may steer the program: not while a graph of it is being recorded."""
        return not (torch.compiler.is_compiling() or torch.jit.is_tracing())

    def _layer_configs(self) -> list[XFormerConfig]:
        return layer_configs(self.config)

    def _check_length(self, positions: Tensor) -> None:
        """Called only where it can fail, as reading the largest position waits for the device: for rows longer than
        what positions exist for (padding may still make them fit), and for positions that the caller chose."""
        if not self._can_inspect():
            return
        longest = int(positions.max()) + 1
        if longest > self.max_length:
            raise ValueError(
                f"The sequence has {longest} tokens, but position {self.config.position.type!r} of this model covers "
                f"{self.max_length} (`max_position_embeddings`); shorten it, or build the model with a larger "
                "`max_position_embeddings` or a position that extrapolates ('rotary', 'sinusoidal_absolute', ...)."
            )


def layer_configs(config: XFormerConfig) -> list[XFormerConfig]:
    """The distinct layers of a tower: one where all are alike."""
    if not config.is_heterogeneous:
        return [config]
    return [config.layer(index) for index in range(config.num_hidden_layers)]


class XFormerModel(XFormerPreTrainedModel):
    """The bare X-former: hidden states without a head.

    `trunk` is the only tower of an encoder or a decoder-only model, and the encoder of an encoder-decoder, whose
    second tower is `decoder`.
    """

    def __init__(self, config: XFormerConfig, add_pooler: bool = True):
        super().__init__(config)
        self.trunk = XFormerTower(config.tower("trunk") if config.is_encoder_decoder else config)
        self.decoder = XFormerTower(config.tower("decoder"), cross=True) if config.is_encoder_decoder else None
        pooled = add_pooler and config.add_pooler and not config.is_encoder_decoder
        self.pooler = (config.stack.build_pooler(config) or Pooler(config)) if pooled else None
        self._tied_weights_keys = self.shared_tables() or None
        self.post_init()

    def shared_tables(self) -> dict[str, str]:
        """Both towers of an encoder-decoder read one token table, tied to the output or not."""
        if self.decoder is None:
            return {}
        return {"decoder.embedding.tokens.weight": "trunk.embedding.tokens.weight"}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return self.shared_tables()

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.trunk.set_input_embeddings(value)
        if self.decoder is not None:
            self.decoder.set_input_embeddings(value)

    def further_inputs(self) -> tuple[str, ...]:
        """Names of inputs beside those that `forward` names, which components of this model read."""
        decoder = () if self.decoder is None else self.decoder.extra_inputs
        pooler = () if self.pooler is None else tuple(self.pooler.inputs)
        return (*self.trunk.extra_inputs, *decoder, *pooler)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.trunk

    def get_decoder(self) -> nn.Module:
        return self.trunk if self.decoder is None else self.decoder

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
        **kwargs: Any,
    ) -> XFormerModelOutput | XFormerSeq2SeqModelOutput:
        """
        Args:
            input_ids: [B, T] token ids, or inputs_embeds [B, T, D] in their place.
            attention_mask: [B, T], 1 = real token. With a cache: of the cached and the new tokens.
            token_type_ids: [B, T], 0 <= id < type_vocab_size.
            position_ids: [B, T]; default: real tokens counted from 0.
            decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask: the same for an encoder-decoder's decoder
                (default: `input_ids` shifted right, padded alike).
            encoder_outputs: an earlier call's encoder outputs, to skip the encoder.
            past_key_values, use_cache: generation cache.

        Raises:
            TypeError: a keyword argument that no component of this model reads.
        """
        refuse_unread(self.config.model_type, kwargs, self.further_inputs(), _NAMED_INPUTS)
        if self.decoder is None:
            for name, value in (
                ("decoder_input_ids", decoder_input_ids),
                ("decoder_inputs_embeds", decoder_inputs_embeds),
            ):
                if value is not None:
                    raise ValueError(f"`{name}` was given to a model without a second tower; leave it out.")
            output = self.trunk(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
            pooled = None
            if self.pooler is not None:
                given = {name: kwargs.get(name) for name in self.pooler.inputs}
                pooled = self.pooler(output.last_hidden_state, output.padding_mask, **given)
            length = (input_ids if input_ids is not None else inputs_embeds).shape[1]
            return XFormerModelOutput(
                last_hidden_state=output.last_hidden_state,
                pooler_output=pooled,
                past_key_values=output.past_key_values,
                hidden_states=output.hidden_states,
                attentions=output.attentions,
                aux_losses=self.reported(output.aux_losses),
                segment_memory=output.segment_memory,
                padding_mask=None if length == output.last_hidden_state.shape[1] else output.padding_mask,
            )
        if encoder_outputs is None:
            encoder_outputs = self.trunk(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, (BaseModelOutput, TowerOutput)):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        for name in self.trunk.extra_inputs:  # they describe the encoder's text
            kwargs.pop(name, None)
        memory, memories = encoder_outputs.last_hidden_state, getattr(encoder_outputs, "memories", None)
        if memories is None and self.trunk.config.stack.gives_memories:
            raise ValueError(
                f"With stack {self.trunk.config.stack.type!r} each decoder layer reads a memory of its own, which the"
                " given `encoder_outputs` lack; give the output object of this model's encoder, not its last state"
                " alone."
            )
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None:
                raise ValueError("An encoder-decoder given `inputs_embeds` needs `decoder_input_ids` as well.")
            decoder_input_ids = self.shift_right(input_ids)
            if decoder_attention_mask is None and attention_mask is not None and attention_mask.ndim == 2:
                # The copy is padded where the input is, and starts at its first real token.
                decoder_attention_mask = attention_mask
                first = (attention_mask != 0) & (attention_mask.cumsum(-1) == 1)
                decoder_input_ids = decoder_input_ids.masked_fill(first, self.config.decoder_start_token_id)
        memory_mask = getattr(encoder_outputs, "padding_mask", None)
        memory_mask = attention_mask if memory_mask is None else memory_mask
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            if not (self.decoder.gradient_checkpointing and self.training):
                past_key_values = make_cache(self.config)
        output = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=memory if memories is None else memories,
            encoder_attention_mask=memory_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        losses = {
            f"encoder_{name}": loss for name, loss in (getattr(encoder_outputs, "aux_losses", None) or {}).items()
        }
        losses.update({f"decoder_{name}": loss for name, loss in (output.aux_losses or {}).items()})
        return XFormerSeq2SeqModelOutput(
            last_hidden_state=output.last_hidden_state,
            past_key_values=output.past_key_values,
            decoder_hidden_states=output.hidden_states,
            decoder_attentions=output.attentions,
            cross_attentions=output.cross_attentions,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            aux_losses=self.reported(losses or None),
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
        first = (ids != -100) & ((ids != -100).cumsum(-1) == 1)
        return shifted.masked_fill(first, start)

    @staticmethod
    def read_from_labels(labels: Tensor) -> Tensor:
        """[B, T] labels -> boolean mask of the decoder inputs that [`shift_right`] makes of them: real from the first
        label (the start token stands there) to the last. What would follow the last label has nothing to predict, and
        is not there either where the text stands alone."""
        labelled = (labels != -100).long()
        return (labelled.cumsum(-1) > 0) & (labelled.flip(-1).cumsum(-1).flip(-1) > 0)


_NAMED_INPUTS = tuple(inspect.signature(XFormerModel.forward).parameters)
