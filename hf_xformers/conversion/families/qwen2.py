# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: `qwen2` -> `xformer`. Llama with biases on queries, keys and values alone; layers read all tokens or
a sliding window, as `layer_types` says."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import llama
from .mistral import COMPONENTS, attention, window_of

FIELDS = {mine: theirs for mine, theirs in llama.FIELDS.items() if mine != "num_key_value_heads"}
KINDS = ("full_attention", "sliding_attention")


def windows(config: PreTrainedConfig) -> list[int | None]:
    """The window of every layer, None where it reads all, as `layer_types` says.

    Raises:
        ValueError: a kind that does not convert, or windows without a size.
    """
    for kind in config.layer_types:
        if kind not in KINDS:
            raise ValueError(f"layer_types has {kind!r}, which does not convert; these do: {', '.join(KINDS)}.")
        if kind != "full_attention" and not config.sliding_window:
            raise ValueError(
                f"layer_types has 'sliding_attention', but `sliding_window` is {config.sliding_window}; give it a"
                " size, and `use_sliding_window=True` where the config has that."
            )
    return [None if kind == "full_attention" else config.sliding_window for kind in config.layer_types]


def layers(config: PreTrainedConfig, full: dict[str, Any], sliding: dict[str, Any] | None = None) -> dict[str, Any]:
    """Our fields for layers of the kinds that `layer_types` lists. full: fields of the attention of all layers;
    sliding: further ones of those with a window.

    Raises:
        ValueError: as [`windows`].
    """
    found = windows(config)
    return llama.by_layer([attention(window, **full, **({} if window is None else sliding or {})) for window in found])


def layer_types(config: XFormerConfig) -> tuple[list[str], int | None]:
    """The kinds of all layers, and the one size of their windows.

    Raises:
        ValueError: windows of several sizes.
    """
    windows = [window_of(config.layer(index)) for index in range(config.num_hidden_layers)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"Windows of {sorted(sizes)} tokens have no counterpart: all windows of the model have one size there."
        )
    return [KINDS[window is not None] for window in windows], next(iter(sizes), None)


def window_fields(config: XFormerConfig) -> dict[str, Any]:
    kinds, window = layer_types(config)
    return {
        "layer_types": kinds,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": next((index for index, kind in enumerate(kinds) if kind != KINDS[0]), 28),
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        **layers(config, {"bias": True, "output_bias": False}),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": llama.own_width(config),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.gated_activation(config, "hidden_act"),
        **window_fields(config),
        "num_key_value_heads": config.key_value_heads,
        **llama.width_beside(config),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="qwen2",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("Qwen2", spans="transformer."),
        components=COMPONENTS,
        per_layer=True,
        # which layers have a window is what `layer_types` says, and its size is theirs
        unread=("hidden_act", "rope_parameters", "max_window_layers", "use_sliding_window", "sliding_window"),
    )
)
