# SPDX-License-Identifier: Apache-2.0
"""Names of transformers, torch, accelerate, peft and datasets that no release promises to keep, all in this place.

`from hf_xformers.compat import name` takes over a name of `BORROWED`. It is looked for when it is first asked for, so
that importing the package stays cheap, and a release without it is refused in words. `HOOKS` are private members of
foreign classes which classes of this package override, set or call. Below stands what reads private attributes of
foreign objects, and what differs between releases that are all admitted.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib.metadata import version
from types import FrameType
from typing import Any

# name here -> (path, what it is for)
BORROWED: dict[str, tuple[str, str]] = {
    "merge_with_config_defaults": (
        "transformers.utils.generic.merge_with_config_defaults",
        "a tower takes what a call leaves out from its config",
    ),
    "assert_async": ("torch._assert_async", "a graph checks that rows hold one text"),
    "capture_outputs": (
        "transformers.utils.output_capturing.capture_outputs",
        "a tower records hidden states and attention weights",
    ),
    "OutputRecorder": (
        "transformers.utils.output_capturing.OutputRecorder",
        "models say which modules' outputs are recorded",
    ),
    "slice_logits_to_keep": ("transformers.modeling_utils.slice_logits_to_keep", "`logits_to_keep`"),
    "grouped_mm": ("transformers.integrations.moe._grouped_mm", "one product for the rows of all experts"),
    "PagedAttentionArgs": (
        "transformers.generation.continuous_batching.input_outputs.PagedAttentionArgs",
        "what a step of continuous batching gives to a model",
    ),
    "DistributedConfig": ("transformers.distributed.DistributedConfig", "`expert_parallel`"),
    "save_optimizer_distributed": (
        "transformers.distributed.checkpoint.save_optimizer_distributed",
        "checkpoints of `expert_parallel`",
    ),
    "load_optimizer_distributed": (
        "transformers.distributed.checkpoint.load_optimizer_distributed",
        "checkpoints of `expert_parallel`",
    ),
    "LabelSmoother": ("transformers.trainer_pt_utils.LabelSmoother", "`label_smoothing_factor`"),
    "AutoImageProcessor": (
        "transformers.models.auto.image_processing_auto.AutoImageProcessor",
        "the image processor of models with one channel is known by its name",
    ),
    "ViTImageProcessorPil": ("transformers.ViTImageProcessorPil", "image processors without torchvision"),
    "BatchSamplerShard": ("accelerate.data_loader.BatchSamplerShard", "texts divided over processes"),
    "DataLoaderShard": ("accelerate.data_loader.DataLoaderShard", "texts divided over processes"),
    "BaseTunerLayer": ("peft.tuners.tuners_utils.BaseTunerLayer", "adapters are merged into weights"),
    "IA3_TARGETS": ("peft.utils.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING", "what IA3 adapts by default"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor.FakeTensorMode", "exports follow shapes without computing"),
    "pytree": ("torch.utils._pytree", "a segment memory is an input of exported programs"),
    "softmax_backward": ("torch.ops.aten._softmax_backward_data", "the derivative of attention weights in tiles"),
}

# Class -> members that are private or in no documentation, which classes of this package override, set or call.
HOOKS: dict[str, str] = {
    "torch.nn.Module": "_buffers _load_from_state_dict _modules _parameters _save_to_state_dict",
    "transformers.PreTrainedConfig": "_attn_implementation",
    "transformers.OPTConfig": "_remove_final_layer_norm",
    "transformers.PreTrainedModel": "_adjust_missing_and_unexpected_keys _can_compile_fullgraph _can_record_outputs"
    " _ep_plan _fsdp_plan _init_weights _initialize_weights _is_stateful _keep_in_fp32_modules_strict"
    " _no_split_modules _resolve_parallel_plans _supports_attention_backend _supports_flash_attn _supports_flex_attn"
    " _supports_sdpa _tied_weights_keys _tp_plan all_tied_weights_keys gather_sharded_state_dict_for_save"
    " get_expanded_tied_weights_keys init_parallel_plans is_distributed_loading_by_transformers"
    " maybe_distribute_model prepare_distribute_model supports_context_parallel",
    "transformers.GenerationMixin": "_expand_inputs_for_generation _get_candidate_generator"
    " _prepare_cache_for_generation _prepare_position_ids_for_generation _supports_default_dynamic_cache"
    " _validate_generation_mode _validate_model_kwargs generate_batch init_continuous_batching",
    "transformers.cache_utils.DynamicLayer": "batch_repeat_interleave batch_select_indices crop get_mask_sizes"
    " get_max_length is_croppable is_initialized lazy_initialization reorder_cache supports_early_init",
    "transformers.Trainer": "_created_lr_scheduler _determine_best_metric _get_eval_sampler _get_num_items_in_batch"
    " _get_output_dir _get_train_sampler _issue_warnings_after_load _load_best_model _load_from_checkpoint"
    " _load_optimizer_and_scheduler _load_rng_state _move_model_to_device _prepare_inputs _save_checkpoint"
    " _save_optimizer_and_scheduler _save_rng_state _set_signature_columns_if_needed _signature_columns"
    " _track_num_input_tokens _train_batch_size",
    "transformers.PreTrainedTokenizerFast": "_encode_plus _pad",
}


def __getattr__(name: str) -> Any:
    if name == "CACHE":
        found: Any = _cache_name()
    elif name in BORROWED:
        found = find(*BORROWED[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def find(path: str, purpose: str) -> Any:
    """The object of a dotted path, such as a function of a module.

    Raises:
        ImportError: the installed release has no such name.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        library = path.split(".")[0]
        raise ImportError(
            f"{library} {version(library)} has no `{path}` ({purpose}), which this hf_xformers needs; install"
            f" a {library} within its bounds, or a newer hf_xformers."
        ) from error


# ---------------------------------------------------------------- private attributes


def shared_setting(config: Any, name: str) -> Any:
    """A field of a config as it stands there, whether or not single layers have another value."""
    return config._getattr_without_heterogeneous_validation(name)


LAYER_SETTINGS = "_heterogeneity_spec"
"""Where a config keeps the settings of single layers, in its `__dict__`."""


def has_own_code(config: Any) -> bool:
    """Whether a config class came with its checkpoint, or is to go with it."""
    return config._auto_class is not None


def class_for(auto: str, config_class: type) -> Any:
    """The class that the Auto class of this name makes for a config class; None where there is none."""
    import transformers

    mapping = getattr(transformers, auto)._model_mapping
    return mapping[config_class] if config_class in mapping else None


def registered_types(mapping: Any) -> dict[str, Any] | None:
    """The dictionary in which transformers keeps the model types entered next to its own; None where it has another
    form (they are then entered one by one)."""
    found = getattr(mapping, "_extra_content", None)
    return found if isinstance(found, dict) else None


def set_registered_types(mapping: Any, types: dict[str, Any]) -> None:
    """Puts another dictionary in its place."""
    mapping._extra_content = types


def class_names(auto_class: Any) -> dict[str, str]:
    """The table of names of classes next to an Auto class, in which others look up what a class is for."""
    return auto_class._model_mapping._model_mapping


def left_on_load(model_class: Any) -> tuple[str, ...]:
    """Patterns of the tensors of a checkpoint that a class of transformers leaves behind without a word."""
    return tuple(model_class._keys_to_ignore_on_load_unexpected or ())


def offloading_hook(module: Any) -> Any:
    """Accelerate's hook, which brings a module's weights for its calls; None where there is none."""
    return getattr(module, "_hf_hook", None)


def runs_again(module: Any) -> bool:
    """Whether it is torch's wrapper for activation checkpointing, which Accelerate's FSDP puts around layers."""
    return "_checkpoint_wrapped_module" in module._modules


def graphs_at_most(count: int) -> Any:
    """A context in which torch compiles a function as often, and then fails, where it would continue uncompiled."""
    import torch

    return torch._dynamo.config.patch(recompile_limit=count, fail_on_recompile_limit_hit=True)


def asked_to_shard(depth: int) -> bool:
    """Whether it is Accelerate's FSDP that called the function so many calls above the one that asks here, through
    peft's and torch's wrappers of a model or without them."""
    if "accelerate" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(depth + 2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("peft.", "torch.")):
        frame = frame.f_back
    return frame is not None and (
        frame.f_globals.get("__name__") == "accelerate.utils.fsdp_utils"
        or frame.f_code.co_name == "set_auto_wrap_policy"
    )


def has_adapter(model: Any) -> bool:
    """Whether `from_pretrained` put an adapter of peft into a model."""
    return model._hf_peft_config_loaded


def under_adapter(module: Any) -> Any:
    """What an adapter of peft is around; None for any other module."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else None


def check_saved_names(model: Any, adapters: dict[str, Any]) -> None:
    """Looks at `modules_to_save`: names that no module has, which peft passes over without a word, are reported.

    Raises:
        ValueError: a name that a module and a part of it have, which peft would not load again.
    """
    from transformers.utils import logging

    places = [place for place, _ in model.named_modules()]
    saved = [place.removesuffix(".modules_to_save") for place in places if place.endswith(".modules_to_save")]
    for outer in saved:
        if any(place.startswith(f"{outer}.") for place in saved):
            around = outer.split(".")[-2:]
            raise ValueError(
                f"`modules_to_save` names {around[-1]!r}, as a module and a part of it are called, of which peft would"
                f" load one alone; write {'.'.join(around)!r}."
            )
    for adapter in adapters.values():
        own = {"classifier", "score", "qa_outputs"}  # which peft adds by itself
        names = set(getattr(adapter, "modules_to_save", None) or ()) - own
        unfound = sorted(name for name in names if not any(place.endswith(name) for place in places))
        if unfound and not getattr(adapter, "ensure_weight_tying", False):  # which adds the token table's own name
            logging.get_logger(__name__).warning(
                f"`modules_to_save` has {unfound}, which no module of {type(model).__name__} is called, so that"
                " nothing is trained or saved for it; the token table is 'embedding.tokens', the output 'lm_head'."
            )


def tied_linear(module: Any) -> Any:
    """The linear map itself where peft, which trains rows of the token table that it is tied to, has put another
    module in its place, which knows of no bias."""
    return getattr(module, "token_adapter", module)


def project(linear: Any, states: Any) -> Any:
    """linear(states), with the bias that [`tied_linear`] is about."""
    inside = tied_linear(linear)
    if inside is linear:
        return linear(states)
    from torch.nn.functional import linear as product  # this file is read before torch is

    return product(states, linear.weight, inside.bias)


def is_trls(forward: Any) -> bool:
    """Whether it is a `forward` by which trl makes logits itself, as of its fused head, whose signature may be that of
    the one before, or of a distillation."""
    code = getattr(forward, "__code__", None)
    redirects = getattr(forward, "__module__", None) == "trl.models.utils"
    return code is not None and ("fused_lm_head" in code.co_varnames or redirects)


def is_trls_product(forward: Any) -> bool:
    """Whether it is the `forward` by which trl takes a head's product in float32 (`cast_lm_head_to_fp32`)."""
    return getattr(forward, "__name__", None) == "cast_forward_to_fp32"


def was_loaded(parameter: Any) -> bool:
    """Whether `from_pretrained` found a parameter in the checkpoint."""
    return getattr(parameter, "_is_hf_initialized", False)


def chosen(generation_config: Any) -> Any:
    """The same settings, which transformers no longer takes for a copy of those in a model's config."""
    generation_config._from_model_config = False
    return generation_config


def parallelism_in_force() -> Any:
    """Accelerate's `ParallelismConfig`, if anybody has made one in this process."""
    state = sys.modules.get("accelerate.state")  # not imported: nobody has asked Accelerate for anything
    return None if state is None else state.AcceleratorState._shared_state.get("parallelism_config")


def weights_from_one_process() -> bool:
    """Whether Accelerate's FSDP2 takes the weights of a model from the first process (`cpu_ram_efficient_loading`)."""
    state = sys.modules.get("accelerate.state")
    plugin = None if state is None else state.AcceleratorState._shared_state.get("fsdp_plugin")
    return plugin is not None and plugin.fsdp_version == 2 and bool(plugin.cpu_ram_efficient_loading)


def fingerprint(dataset: Any) -> str:
    """What datasets knows a dataset's content by."""
    return dataset._fingerprint


def read_columns(trainer: Any, dataset: Any) -> Any:
    """The columns of a dataset that a trainer's model reads, or all where its arguments keep them."""
    return trainer._remove_unused_columns(dataset, description="training")


def has_hooks(module: Any) -> bool:
    """Whether anything is called before or after a module's own `forward` or its derivative."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def grouped_mm_fallback() -> Any:
    """transformers' operator for the products of experts that the kernel does not take: types and widths."""
    find("transformers.integrations.moe._grouped_mm", "which registers it")
    return find("torch.ops.transformers.grouped_mm_fallback", "products of experts in float64")


def fused_attention_with_norm() -> Any:
    """torch's attention for CPUs that gives the logarithms of its sums as well; None in releases without it, where
    these are computed in steps."""
    import torch

    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


# ---------------------------------------------------------------- differences between releases


CACHE: str
"""What transformers calls a cache in the outputs of models, and in what `generate` gives them: `cache` from 5.24 on,
`past_key_values` before. Models of this package take either, and their outputs have this one."""


def _cache_name() -> str:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that a model was given under either of its names; None: under neither.

    Raises:
        ValueError: two caches.
    """
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        raise ValueError(
            "`cache` and `past_key_values` are two names of one input, but differ here; give one of them."
        )
    return past_key_values if cache is None else cache


def reformer_adds_bias() -> bool:
    """Whether transformers' Reformer adds a bias to the scores of tokens, as from 5.24 on."""
    major, minor = version("transformers").split(".")[:2]
    return (int(major), int(minor)) >= (5, 24)


def own_parameters(module: Any) -> list[Any]:
    """The parameters of a module without those inside. `parameters()` of a replica of nn.DataParallel has none: they
    are tensors there, which lead back to the model's."""
    return list(module.parameters(recurse=False)) or list(getattr(module, "_former_parameters", {}).values())


def named_parameters_of(module: Any) -> dict[str, Any]:
    """The parameters of a module and of those inside by name, in a replica, too."""
    return dict(module.named_parameters()) or {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, inner in module.named_modules()
        for name, tensor in getattr(inner, "_former_parameters", {}).items()
    }


def parameters_of(module: Any) -> list[Any]:
    """The same without names, each once."""
    return list(dict.fromkeys(named_parameters_of(module).values()))
