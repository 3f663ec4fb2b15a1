# SPDX-License-Identifier: Apache-2.0
"""Language models: masked, causal and sequence to sequence. Each class says which shape (encoder, causal decoder,
encoder-decoder) it needs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import ContinuousBatchingConfig, GenerationMixin, GenerationMode
from transformers.utils import can_return_tuple, logging

from ..compat import CACHE, one_cache, slice_logits_to_keep
from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.cache import RecurrentStateLayer, cache_layers, make_cache, stateful_part
from ..core.call_readers import sharding_in_force
from ..core.choices import token_rows
from ..core.inputs import check_axes, check_token_labels
from ..core.losses import counted_after_real_tokens, next_token_cross_entropy, step_share, token_cross_entropy
from ..core.paging import PagedTexts, check_paged
from ..core.sequence_parallel import next_tokens
from ..core.text_parts import division_in_force
from ..core.whole_modules import end_for
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel

logger = logging.get_logger(__name__)


class LanguageModel(XFormerPreTrainedModel):
    """A base model and a vocabulary head, tied to the token table unless the config unties it."""

    reads_pooler = False
    reads_every_token = True

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        self.model = XFormerModel(config, add_pooler=self.reads_pooler)
        self.model.under_a_head = True
        view = config.layer(max(config.num_hidden_layers - 1, 0))
        if not config.shares_token_table:  # what is predicted are ids of the decoder
            view = copy.copy(view)
            view.vocab_size = config.decoder_vocab_size  # type: ignore[assignment]
        self.lm_head = config.head.build(view)
        table = "model.trunk.embedding" if config.shares_token_table else "model.decoder.embedding"
        self._tied_weights_keys = {
            f"lm_head.{name}": f"{table}.{there}" for name, there in config.head.tied(config).items()
        }
        tower = config.tower("decoder") if config.is_encoder_decoder else config
        self.exits: Any = tower.stack.build_exits(tower) if tower.stack.exits == "decoder" else None
        self.post_init()

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        plan = self._tp_plan or {}
        if not any(name.endswith("embedding.tokens") for name in plan):
            return
        for name, table in (self._tied_weights_keys or {}).items():  # what is tied to the table is split as it is
            module, _, kind = name.rpartition(".")
            if kind == "weight" and table.endswith("embedding.tokens.weight"):
                plan[module] = "colwise_gather_output"

    def own_inputs(self) -> dict[str, Tensor]:
        """Inputs of the model under this head that the head itself has, by name."""
        return {}

    def get_output_embeddings(self) -> nn.Module | None:
        return end_for(self, self.lm_head.decoder)

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head.decoder = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        outputs, size = self.config.head.num_outputs(self.config), self.config.vocab_size
        if new_num_tokens not in (None, size) and outputs != size:
            raise ValueError(
                f"The vocabulary of {size} cannot become one of {new_num_tokens}: the head predicts the first"
                f" {outputs} ids alone (`unpredicted`); keep its size."
            )
        if new_num_tokens not in (None, size) and not self.config.head.resizes:
            raise ValueError(
                f"The vocabulary of {size} cannot become one of {new_num_tokens}: head {self.config.head.type!r} does"
                " not predict tokens one by one; keep its size."
            )
        if new_num_tokens not in (None, size) and self.config.head.clusters(self.config) is not None:
            raise ValueError(
                f"The vocabulary of {size} cannot become one of {new_num_tokens}: head {self.config.head.type!r}"
                " predicts it in clusters of fixed size; keep its size."
            )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        found = self.model.get_encoder(modality)
        return self if found is self.model else found

    def get_decoder(self) -> nn.Module:
        return self.model.get_decoder()


class _Generative(LanguageModel, GenerationMixin):
    """Generation with the cache that the config's mechanisms declare."""

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        # A state that cannot forget its last tokens: transformers then refuses to decode with an assistant.
        self._is_stateful = not make_cache(config).is_croppable

    def _validate_generation_mode(self, generation_mode: Any, *args: Any, **kwargs: Any) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            raise ValueError(
                f"{type(self).__name__} ({self.config.model_type!r}) cannot check drafted tokens, as its state cannot"
                " forget those that are not taken; leave `assistant_model` and `prompt_lookup_num_tokens` out, or take"
                " a model that keeps keys and values, such as an 'xf_gpt2'."
            )
        super()._validate_generation_mode(generation_mode, *args, **kwargs)  # type: ignore[misc]  # as further below

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        if generation_config.is_assistant and self._is_stateful:
            raise ValueError(
                f"{type(self).__name__} ({self.config.model_type!r}) cannot draft tokens for another model, as its"
                " state cannot forget those that are not taken; take an assistant model that keeps keys and values,"
                " such as an 'xf_gpt2', or leave `assistant_model` out."
            )
        tower = self.config.tower("decoder") if self.config.is_encoder_decoder else self.config
        for index in range(tower.num_hidden_layers):
            if reason := tower.layer(index).attention.why_not.get("generate"):
                raise ValueError(reason)
        given = model_kwargs.get(CACHE) is not None
        if generation_config.use_cache is not False and generation_config.return_dict_in_generate:
            self._say_what_has_no_weights(generation_config, tower)
        # The other implementations hold keys and values, which a stateful mechanism has not, or has not alone.
        stateful = stateful_part(tower)
        ours = generation_config.cache_implementation in (None, "dynamic") or self._is_stateful or bool(stateful)
        if not given and generation_config.use_cache is not False and ours:
            cache = model_kwargs[CACHE] = make_cache(self.config)
            if generation_config.is_assistant:  # windows keep what they may have to go back to
                cache.activate_past_recording()
            if generation_config.cache_implementation not in (None, "dynamic"):
                logger.warning_once(
                    f"`cache_implementation={generation_config.cache_implementation!r}` holds keys and values, but "
                    f"{stateful} keeps another state; generating with its own cache."
                )
            return
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get(CACHE)
        if not given and cache is not None and cache.is_compileable:
            self._check_capacity(tower, model_kwargs, max_cache_length)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs) + self.config.first_position

    def _check_capacity(self, tower, model_kwargs: dict[str, Any], slots: int) -> None:
        """A static cache counts its tokens on the device, where no step can ask whether there is a place for the
        next."""
        limits = [(tower.position, tower.position.max_length(tower))]
        limits += [(layer.attention, layer.attention.places(layer)) for layer in tower.layer_configs()]
        mask = model_kwargs.get("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask")
        for spec, limit in limits:
            if limit is None or slots <= limit:
                continue
            padding = 0 if mask is None or mask.ndim != 2 else int((mask == 0).sum(-1).min())
            if slots - padding > limit:
                raise ValueError(
                    f"The prompt and `max_new_tokens` make the model read up to {slots - padding} tokens, but"
                    f" {spec.slot} {spec.type!r} of this model covers {limit} (`max_position_embeddings`); set a"
                    " smaller `max_new_tokens`, or shorten the prompt."
                )

    def _say_what_has_no_weights(self, generation_config, tower) -> None:
        states = [holder for layer, holder in cache_layers(tower) if isinstance(layer, RecurrentStateLayer)]
        mechanism = next((holder.type for holder in states if holder.slot == "attention"), None)
        if generation_config.output_attentions and mechanism is not None:
            logger.warning_once(
                f"attention {mechanism!r} keeps a state in place of keys, so that only the first step has"
                " attention weights; pass `use_cache=False` for those of every step."
            )

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """As transformers', on which `generate_batch` and its context manager stand.

        Raises:
            ValueError: a model whose state cannot lie in pages, or texts longer than its positions.
        """
        hints = workload_hints
        beams = None if generation_config is None else generation_config.num_beams
        if beams is not None and beams > 1:
            raise ValueError(
                f"Continuous batching continues each text by itself, so `num_beams={beams}` has no meaning there; set"
                " it to 1, or use `generate`."
            )
        check_paged(self.config, 0 if hints is None else hints.max_prompt_length + hints.max_generated_length)
        given = {} if generation_config is None else vars(generation_config)  # where it stood in earlier releases
        wanted = continuous_batching_config or given.get("continuous_batching_config") or ContinuousBatchingConfig()
        wanted = copy.copy(wanted)
        wanted.auto_switch_to_flash = False  # its kernels read no mask
        return super().init_continuous_batching(generation_config, wanted, workload_hints)

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """As transformers'.

        Raises:
            ValueError: as [`init_continuous_batching`]; a prompt without tokens.
        """
        for place, prompt in enumerate(inputs):
            if not len(prompt):
                raise ValueError(
                    f"Prompt {place} has no tokens; give at least one, such as the token that begins a text."
                )
        return super().generate_batch(inputs, *args, **kwargs)

    def _exit_watch(self, labelled: bool, inputs: dict[str, Any]) -> Any:
        """Attaches the early-exit observer, if the model has one, to the inputs."""
        watch = None if self.exits is None else self.exits.watch(self, labelled and self.training)
        if watch is not None:
            inputs["exit_watch"] = watch
        return watch

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if "prepare_inputs_for_generation" in vars(self) and "cache" in inputs:
            # peft stands before this method, and puts learned prefixes into a cache that has its former name.
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # transformers goes by the class's name, and its own Reformer keeps another type of cache

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # Inputs that a component asks for are in no signature, where transformers looks for typos.
        known = self.model.trunk.extra_inputs
        asked = {name: value for name, value in model_kwargs.items() if name not in known}
        super()._validate_model_kwargs(asked)  # type: ignore[misc]  # declared for a class that is there in typing alone

    def _expand_inputs_for_generation(  # type: ignore[override]  # transformers calls it by keywords
        self, expand_size: int = 1, **kwargs: Any
    ) -> Any:
        # transformers repeats tensors for beams; a segment memory is an object of several.
        carried = kwargs.pop("segment_memory", None)
        expand = super()._expand_inputs_for_generation  # type: ignore[misc]  # as above
        input_ids, inputs = expand(expand_size=expand_size, **kwargs)
        if carried is not None:
            inputs["segment_memory"] = carried.repeat_interleave(expand_size)
        return input_ids, inputs


class XFormerForMaskedLM(LanguageModel):
    """An encoder that predicts masked tokens."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False))
        self.model.trunk.reads_tokens_alone = True

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
    ) -> outputs.XFormerMaskedLMOutput:
        """labels: [B, T], the original id where a token is to be predicted, -100 elsewhere. logits: [B, T, V]."""
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
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        return outputs.XFormerMaskedLMOutput(
            loss=self.with_aux_losses(
                loss, base, partial(token_rows, logits, labels, count), share=step_share(labels, count)
            ),
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
        )


class XFormerForCausalLM(_Generative):
    """A decoder that predicts the next token."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=True, is_encoder_decoder=False))
        self.model.trunk.reads_tokens_alone = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerCausalLMOutput:
        """labels: [B, T] like `input_ids` (the shift is inside, but with `labels_in_place`), -100 where there is no
        target; a text's first token is none where padding stands before it. logits: [B, T, V], or of the last
        `logits_to_keep` positions."""
        count, shift_labels = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        past_key_values = PagedTexts.of_step(one_cache(past_key_values, cache), kwargs)
        watch = self._exit_watch(labels is not None or shift_labels is not None, kwargs)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(base.last_hidden_state, logits_to_keep))
        check_token_labels(labels, logits)
        if self.config.labels_in_place and shift_labels is None:
            shift_labels = labels
        loss, rows, share, division = None, None, None, division_in_force()
        if division is not None and labels is not None and shift_labels is None:
            shift_labels = next_tokens(labels, attention_mask, division)
        if shift_labels is not None:  # the caller shifted already (sequence parallelism): position t's own target
            loss = token_cross_entropy(logits, shift_labels, count)
            rows, share = partial(token_rows, logits, shift_labels, count), step_share(shift_labels, count)
        elif labels is not None:
            if sharding_in_force():
                raise ValueError(
                    "Under context parallelism the next token may be in another process; give `shift_labels`, the"
                    " labels shifted by one before they are divided like `input_ids`."
                )
            labels, count = counted_after_real_tokens(logits, labels, attention_mask, count)
            loss = next_token_cross_entropy(logits, labels, count)
            rows = partial(token_rows, logits, labels, count, shifted=True)
            share = step_share(labels, count, shifted=True)
        if watch is not None and watch.learns:
            targets = shift_labels
            if labels is not None and targets is None:
                targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            loss = self.exits.loss(self, watch, logits, targets, count)
        return outputs.XFormerCausalLMOutput(
            loss=self.with_aux_losses(loss, base, rows, share=share),
            logits=logits,
            **{CACHE: getattr(base, CACHE)},
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
            exit_layers=None if watch is None else watch.exit_layers(),
        )


class XFormerForSeq2SeqLM(_Generative):
    """An encoder-decoder that predicts a target text."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=True))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """[B, T] labels (-100: padding) -> decoder inputs [B, T], for data collators."""
        return self.model.shift_right(labels)

    def _read_late(
        self, labels: Tensor, decoder_input_ids: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The decoder's inputs and mask for `labels`. Padding of the labels is padding of the inputs made of them, by
        this model or by a data collator beforehand; rows of other inputs are taken as they are."""
        read = self.model.read_from_labels(labels) if mask is None else mask
        if decoder_input_ids is None:
            return self.model.shift_right(labels), read
        if mask is None and decoder_input_ids.shape == labels.shape and self.config.decoder_start_token_id is not None:
            mask = read | (decoder_input_ids != self.model.shift_right(labels)).any(-1, keepdim=True)
        return decoder_input_ids, mask

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
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSeq2SeqLMOutput:
        """labels: [B, T_target] ids, -100 where there is no target; the decoder reads them shifted right. logits:
        [B, T_target, V]."""
        count = kwargs.pop("num_items_in_batch", None)
        watch = self._exit_watch(labels is not None, kwargs)
        check_axes("labels", labels)
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_inputs_embeds is None:
                decoder_input_ids, decoder_attention_mask = self._read_late(
                    labels, decoder_input_ids, decoder_attention_mask
                )
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            past_key_values=one_cache(past_key_values, cache),
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(base.last_hidden_state, logits_to_keep))
        check_token_labels(labels, logits)
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        if watch is not None and watch.learns:
            loss = self.exits.loss(self, watch, logits, labels, count)
        return outputs.XFormerSeq2SeqLMOutput(
            loss=self.with_aux_losses(
                loss, base, partial(token_rows, logits, labels, count), share=step_share(labels, count)
            ),
            logits=logits,
            **{CACHE: getattr(base, CACHE)},
            decoder_hidden_states=base.decoder_hidden_states,
            decoder_attentions=base.decoder_attentions,
            cross_attentions=base.cross_attentions,
            encoder_last_hidden_state=base.encoder_last_hidden_state,
            encoder_hidden_states=base.encoder_hidden_states,
            encoder_attentions=base.encoder_attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
            exit_layers=None if watch is None else watch.exit_layers(),
        )
