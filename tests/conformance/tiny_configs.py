"""A tiny configuration for any config class, found by the names of its fields."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 99, 32, 2, 4, 64, 64

# size -> the names that model configs have for it
_SIZES = {
    HIDDEN: "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim model_dim n_embed d_embed emb_dim "
    "decoder_hidden_size encoder_hidden_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers decoder_num_layers",
    HEADS: "num_attention_heads n_head n_heads num_heads heads encoder_attention_heads decoder_attention_heads "
    "decoder_num_heads num_decoder_attention_heads",
    8: "head_dim d_kv dim_head attention_head_size d_head",
    FEED_FORWARD: "intermediate_size d_ff ffn_dim n_inner inner_dim mlp_dim ff_dim feed_forward_size encoder_ffn_dim "
    "decoder_ffn_dim feedforward_dim ffn_hidden_size d_inner dim_feedforward max_position_embeddings n_positions "
    "max_seq_len max_seq_length n_ctx max_length_embeddings max_sequence_length max_target_positions "
    "max_source_positions",
    VOCAB: "vocab_size num_tokens",
}
FIELD_SIZE = {name: size for size, names in _SIZES.items() for name in names.split()}

# Sizes inside a mechanism. They only ever shrink, and a value that switches something off (0, None) stays.
MECHANISM_SIZE = {
    **dict.fromkeys(
        "block_size window window_size local_window_size attention_window chunk_size chunk_length bucket_size stride "
        "num_landmarks low_rank rank projected_length num_inducing_points num_latents proj_k linformer_k "
        "kv_proj_length num_clusters memory_size memory_length mem_len cmem_len num_experts num_local_experts "
        "patch_size top_k".split(),
        4,
    ),
    **dict.fromkeys("segment_size segment_length state_size relative_attention_num_buckets".split(), 8),
    **dict.fromkeys("num_random_features nb_features num_features feature_dim image_size".split(), 16),
    **dict.fromkeys("num_random_blocks num_rand_blocks num_global_tokens num_hashes".split(), 1),
    **dict.fromkeys("num_experts_per_tok num_memory_tokens type_vocab_size".split(), 2),
    "num_channels": 3,
    "conv_kernel_size": 3,
    "relative_attention_max_distance": 16,
}

# Special tokens: ids inside the vocabulary that the random inputs never contain.
TOKENS = {
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "mask_token_id": 3,
    "unk_token_id": 4,
}
FIRST_FREE_ID = 5

# Fields of the base class, which say nothing about size.
_BASE_FIELDS = set(
    "architectures chunk_size_feed_forward dtype id2label is_encoder_decoder label2id output_attentions "
    "output_hidden_states problem_type return_dict sub_configs transformers_version".split()
)


def config_fields(config_class: type) -> dict[str, Any]:
    """Field name -> default, for dataclass configs and for those with an `__init__` of their own."""
    fields = {}
    if dataclasses.is_dataclass(config_class):
        for field in dataclasses.fields(config_class):
            fields[field.name] = None if field.default is dataclasses.MISSING else field.default
    for cls in reversed(config_class.__mro__):
        init = cls.__dict__.get("__init__")
        if init is None or cls.__name__ in ("PreTrainedConfig", "PretrainedConfig", "object"):
            continue
        for name, parameter in inspect.signature(init).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self":
                fields.setdefault(name, None if parameter.default is parameter.empty else parameter.default)
    return {name: default for name, default in fields.items() if name not in _BASE_FIELDS}


def tiny_kwargs(config_class: type, overrides: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    """Arguments for a tiny config of this class, and the large fields that no rule here knows (`name=default`)."""
    kwargs, unknown = copy.deepcopy(_tiny(config_class))
    if kind == "seq2seq":
        kwargs.setdefault("decoder_start_token_id", TOKENS["decoder_start_token_id"])
    kwargs.update(overrides)
    return kwargs, [entry for entry in unknown if entry.split("=")[0] not in overrides]


@functools.cache
def _tiny(config_class: type) -> tuple[dict[str, Any], list[str]]:
    """What `tiny_kwargs` gives without overrides, found once for each class."""
    fields = config_fields(config_class)
    canonical = {real: name for name, real in getattr(config_class, "attribute_map", {}).items()}
    kwargs: dict[str, Any] = {}
    unknown = []
    for name, default in fields.items():
        value = _tiny_value(name, canonical.get(name, name), default, fields)
        if value is not None:
            kwargs[name] = value
        elif _is_int(default) and default > 64 and canonical.get(name, name) not in TOKENS:
            unknown.append(f"{name}={default}")
    kwargs.update(_tiny_components(config_class))
    return kwargs, unknown


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tiny_value(name: str, canonical: str, default: Any, fields: dict[str, Any]) -> Any:
    """The tiny value of one field, or None to leave it at its default."""
    if isinstance(default, (list, tuple)) and canonical not in MECHANISM_SIZE:
        return None  # sizes by stage: an override has to say them
    if default is None and canonical in ("num_decoder_layers", "n_inner", "head_dim", "d_head", "inner_dim"):
        return None  # derived from another field
    for known in (name, canonical):
        if known in FIELD_SIZE:
            return FIELD_SIZE[known]
    if canonical == "num_key_value_heads":
        heads = next((fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in fields), None)
        return None if default is None else HEADS if default == heads else HEADS // 2
    if canonical in MECHANISM_SIZE:
        if isinstance(default, list):
            return [MECHANISM_SIZE[canonical]] * LAYERS
        return min(MECHANISM_SIZE[canonical], default) if _is_int(default) and default > 0 else default
    if canonical in TOKENS and (default is not None or canonical == "pad_token_id"):
        return TOKENS[canonical]
    if ("dropout" in name or name.endswith("pdrop")) and isinstance(default, (int, float)):
        return 0.1  # on, so that the tests see that evaluation switches it off
    return None


def _tiny_components(config_class: type) -> dict[str, Any]:
    """Nested component specs of the default config with their sizes shrunk, as dicts; only those that change."""
    try:
        config = config_class()
    except Exception:  # no defaults: there is nothing nested to read
        return {}
    components = {}
    for name, spec in vars(config).items():
        if not (dataclasses.is_dataclass(spec) and hasattr(spec, "to_dict")):
            continue
        values = spec.to_dict()
        sizes = {
            key: min(MECHANISM_SIZE[key], value)
            for key, value in values.items()
            if key in MECHANISM_SIZE and _is_int(value) and value > 0
        }
        if any(values[key] != size for key, size in sizes.items()):
            components[name] = {**values, **sizes}
    return components
