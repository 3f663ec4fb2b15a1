# SPDX-License-Identifier: Apache-2.0
"""What a configuration refuses before it asks its components: misspelled fields, and values of another range."""

from __future__ import annotations

import dataclasses
import difflib
from numbers import Integral
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from ..compat import shared_setting
from .components import SLOTS, build_spec, resolve_field_types

# Keys that transformers and its neighbors add to a config.json and that are no fields of ours.
_FOREIGN_KEYS = (
    "auto_map",
    "quantization_config",
    "tie_last_hidden_states",
    "custom_pipelines",
    "_name_or_path",
    "add_cross_attention",  # of decoders that read an encoder, as `is_encoder_decoder` is not set in them
    "layer_norm_epsilon",  # other models' name of `layer_norm_eps`, which generic code sets on any config
)

# What single layers may have of their own; the rest belongs to the whole model.
_OF_LAYERS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "attention_probs_dropout_prob",
    "activation_dropout_prob",
    "layer_norm_eps",
    "chunk_size_feed_forward",
    "attention",
    "cross_attention",
    "normalization",
    "residual",
    "feedforward",
)


def with_specs(overrides: dict[str, Any]) -> dict[str, Any]:
    return {key: build_spec(key, value) if key in SLOTS else value for key, value in overrides.items()}


def refuse_typos(config: Any, kwargs: dict[str, Any]) -> None:
    """transformers keeps unknown keyword arguments as attributes; one that nearly names a field is a typo."""
    valid = [field.name for field in dataclasses.fields(config)]
    for key in kwargs:
        if key in _FOREIGN_KEYS:
            continue
        close = difflib.get_close_matches(key, valid, n=1, cutoff=0.85)
        if close:
            raise ValueError(f"{type(config).__name__} has no field {key!r}; did you mean {close[0]!r}?")


def check_base_fields(config: Any) -> None:
    """Fields of transformers' own, which it reads before it checks them."""
    if isinstance(config.dtype, str) and not isinstance(getattr(torch, config.dtype, None), torch.dtype):
        raise ValueError(f"`dtype` is the name of a torch dtype such as 'bfloat16', got {config.dtype!r}.")
    if config.id2label is None:
        return
    if not isinstance(config.id2label, dict):
        raise TypeError(
            "`id2label` must be a dict of class numbers and names, such as {0: 'no', 1: 'yes'}, got"
            f" {config.id2label!r}."
        )
    for key in config.id2label:
        if not (key.isdecimal() if isinstance(key, str) else isinstance(key, Integral) and int(key) >= 0):
            raise ValueError(f"`id2label` has class numbers from 0 on as keys, got {key!r}; give numbers.")


def layers_with_specs(config: Any, layers: Any) -> dict[int, dict[str, Any]]:
    """Overrides by layer, as `per_layer_config` keeps them; JSON turned their keys into text."""
    if not isinstance(layers, dict):
        raise TypeError(
            "`per_layer_config` must be a dict of layer numbers and their fields, such as "
            f"{{0: {{'attention': 'dense'}}}}, got {type(layers).__name__}: {layers!r}."
        )
    found: dict[int, dict[str, Any]] = {}
    for key, overrides in layers.items():
        layer = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 or layer in found:
            raise ValueError(
                f"`per_layer_config` has numbers of layers from 0 on as keys, each once, got {key!r}; give such"
                " numbers."
            )
        refuse_unknown(config, f"`per_layer_config[{key!r}]`", overrides)
        found[layer] = with_specs(overrides)
    return found


def check_layer_fields(config: Any, where: str) -> None:
    """Refuses a field that single layers differ in, where it belongs to the whole tower."""
    for name in sorted((config.per_layer_attributes or set()) - set(_OF_LAYERS)):
        raise ValueError(
            f"{where} overrides {name!r}, which all layers of a tower have in common; set it for the whole tower."
            f" Single layers can have these of their own: {', '.join(_OF_LAYERS)}."
        )


def refuse_unknown(
    config: Any, where: str, overrides: dict[str, Any], allowed: tuple[str, ...] = (), shared: tuple[str, ...] = ()
) -> None:
    if not isinstance(overrides, dict):
        raise TypeError(f"{where} must be a dict of fields, got {type(overrides).__name__}: {overrides!r}.")
    valid = [field.name for field in dataclasses.fields(config)] + list(allowed)
    for key in overrides:
        if key in shared:
            raise ValueError(f"{where} overrides {key!r}, which both towers share; set it on the config itself.")
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; leave it out."
            raise ValueError(f"{where} overrides {key!r}, which is no field of {type(config).__name__}{hint}")


def check_geometry(config: Any) -> None:
    counts = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_decoder_layers",
        "decoder_vocab_size",
        "num_attention_heads",
        "head_dim",
    )
    for name in (*counts, "intermediate_size"):
        value = shared_setting(config, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    for name in ("type_vocab_size", "layer_norm_eps", "initializer_range", "chunk_size_feed_forward"):
        value = shared_setting(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"`{name}` must not be negative, got {value}.")
    for name in ("pooler_activation", "classifier_activation"):
        value = shared_setting(config, name)
        if value not in ACT2FN:
            raise ValueError(f"`{name}`: unknown activation {value!r}; known: {', '.join(sorted(ACT2FN))}.")
    rates = (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "activation_dropout_prob",
        "classifier_dropout",
        "layer_drop",
    )
    for name in rates:
        value = shared_setting(config, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"`{name}` is a probability in [0, 1), got {value}.")


def strict_config(cls: Any) -> None:
    """Applies `strict` in place and turns its errors into the built-in `TypeError` and `ValueError`."""
    resolve_field_types(cls)
    strict(cls)

    def translated(method):
        def call(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except StrictDataclassError as error:
                cause = error.__cause__
                while cause is not None and isinstance(cause.__cause__, (TypeError, ValueError)):
                    cause = cause.__cause__
                kind = cause.__class__ if isinstance(cause, (TypeError, ValueError)) else ValueError
                raise kind(f"{type(self).__name__}: {cause or error}") from None

        call.__wrapped__ = method
        call.__name__, call.__doc__ = method.__name__, method.__doc__
        return call

    cls.__setattr__ = translated(cls.__setattr__)
    cls.__init__ = translated(cls.__init__)
    # A dataclass compares fields, which cannot be read off a config whose layers differ.
    cls.__eq__ = lambda self, other: type(other) is type(self) and other.to_dict() == self.to_dict()
