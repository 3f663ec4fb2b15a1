# SPDX-License-Identifier: Apache-2.0
"""Mistral: `mistral` -> `xformer`. Llama whose layers all read a sliding window, where it has one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import llama

COMPONENTS = {**llama.COMPONENTS, "attention": ("dense", "band_attention")}


def attention(window: int | None, **fields: Any) -> dict[str, Any]:
    """Our attention that reads the last `window` tokens, its own included; None: all."""
    if window is None:
        return {"type": "dense", **fields}
    return {"type": "band_attention", "window_size": window, **fields}


def window_of(config: XFormerConfig) -> int | None:
    """The window of a layer; the inverse of [`attention`].

    Raises:
        ValueError: layers have windows of several sizes in one field.
    """
    window = getattr(config.attention, "window_size", None)
    if isinstance(window, tuple):
        raise ValueError(
            f"window_size={window!r} has no counterpart; give each layer its own attention in `per_layer_config`."
        )
    return window


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "head_dim": config.head_dim,
        "attention": attention(config.sliding_window, bias=False),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.head_width(config),
        **llama.gated_activation(config, "hidden_act"),
        "sliding_window": window_of(config),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="mistral",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("Mistral"),
        components=COMPONENTS,
        unread=("hidden_act", "rope_parameters"),
    )
)
