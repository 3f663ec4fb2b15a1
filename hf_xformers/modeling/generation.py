# SPDX-License-Identifier: Apache-2.0
"""Language models that write texts, with the cache that the config's mechanisms declare."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.generation import ContinuousBatchingConfig, GenerationMixin, GenerationMode
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from ..compat import CACHE
from ..configuration_xformer import XFormerConfig
from ..core.cache import RecurrentStateLayer, cache_layers, make_cache, stateful_part
from ..core.paging import check_paged
from .language_model import LanguageModel

logger = logging.get_logger(__name__)


class GenerativeModel(LanguageModel, GenerationMixin):
    """Generation with the cache that the config's mechanisms declare."""

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        # A state that cannot forget its last tokens: transformers then refuses to decode with an assistant.
        self._is_stateful = not make_cache(config).is_croppable

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            raise ValueError(
                f"{type(self).__name__} ({self.config.model_type!r}) cannot check drafted tokens, as its state cannot"
                " forget those that are not taken; leave `assistant_model`, `prompt_lookup_num_tokens` and `use_mtp`"
                " out, or take a model that keeps keys and values, such as an 'xf_gpt2'."
            )
        if generation_config.assistant_early_exit is not None:  # for which transformers changes the config
            raise ValueError(
                f"{type(self).__name__} cannot draft with its first layers"
                f" (`assistant_early_exit={generation_config.assistant_early_exit}`); leave it out, and pass a smaller"
                " model as `assistant_model`, or `prompt_lookup_num_tokens`."
            )
        if self.config.is_encoder_decoder and generation_config.guidance_scale not in (None, 1):
            raise ValueError(
                f"`guidance_scale={generation_config.guidance_scale}` compares with what is written without the"
                f" prompt, which is the text that {type(self).__name__} encodes; leave it out, or take a decoder."
            )
        super()._validate_generation_mode(  # type: ignore[misc]  # as further below
            generation_mode, generation_config, *args, **kwargs
        )

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(generation_config, "use_mtp", None):
            raise ValueError(
                f"{type(self).__name__} has no modules that draft tokens (`use_mtp={generation_config.use_mtp}`); load"
                " a checkpoint of the objective 'mtp' by its own class, `...ForMultiTokenPrediction`, or leave"
                " `use_mtp` out."
            )
        return super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]  # as below

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

    def compute_transition_scores(self, sequences: Tensor, scores: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers finds a token's score by the config's `vocab_size`, and a head may predict fewer or other ids.
        reader: Any = SimpleNamespace(config=copy.copy(self.config))
        reader.config.vocab_size = scores[0].shape[-1]
        return GenerationMixin.compute_transition_scores(reader, sequences, scores, *args, **kwargs)

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

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if "prepare_inputs_for_generation" in vars(self) and "cache" in inputs:
            # peft stands before this method, and puts learned prefixes into a cache that has its former name.
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def create_masks_for_generate(self, config: XFormerConfig, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The mask of a step with a static cache: of pairs, or of real tokens, of which other back-ends make theirs
        where they run."""
        if config._attn_implementation in ("eager", "sdpa"):
            return create_masks_for_generate(config=config, attention_mask=attention_mask, **kwargs)
        return attention_mask

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
