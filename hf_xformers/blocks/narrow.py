# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention is of another width, or has other heads, than the config says."""

from __future__ import annotations

import copy
from typing import Any

# What a position does inside attention; and what of that is made for states of the model's width.
_INSIDE = {"rotation", "score_bias", "score_terms", "head_terms"}
_OF_STATES = {"score_terms", "head_terms"}


def reshaped(config: Any, *, width: int | None = None, heads: int | None = None) -> Any:
    """The config of a layer for a part of it that reads `width` channels, with `heads` heads. Heads share these
    channels evenly, unless `head_dim` says how wide they are."""
    view = copy.copy(config)
    width = config.hidden_size if width is None else width
    heads = config.num_attention_heads if heads is None else heads
    if heads != config.num_attention_heads and config.num_key_value_heads == config.num_attention_heads:
        view.num_key_value_heads = heads
    view.hidden_size, view.num_attention_heads = width, heads
    if width != config.hidden_size or heads != config.num_attention_heads:
        view.head_dim = config.head_dim if config.head_dim is not None else width // heads
    return view


def check_reshaped(name: str, config: Any, part: Any) -> None:
    """Refuses what does not fit a `part` of a layer ([`reshaped`]) in block `name`.

    Raises:
        ValueError: names the block and what does not fit.
    """
    heads, kv_heads = part.num_attention_heads, part.num_key_value_heads
    if config.head_dim is None and part.hidden_size % heads:
        raise ValueError(
            f"block {name!r} gives attention {part.hidden_size} channels, which {heads} heads cannot share evenly;"
            " change `num_attention_heads` or `hidden_size`, or set `head_dim`."
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"block {name!r} has an attention of {heads} heads, which {kv_heads} key/value heads cannot serve; leave"
            " `num_key_value_heads` out."
        )
    acts = config.position.acts & _INSIDE
    changed = part.hidden_size != config.hidden_size or heads != config.num_attention_heads
    if changed and acts & _OF_STATES:
        raise ValueError(
            f"block {name!r} gives attention other channels or heads than the rest of the model has, which position"
            f" {config.position.type!r} makes its terms for; use 'rotary' or a position at the input such as"
            " 'sinusoidal_absolute'."
        )
    alike = heads == config.num_attention_heads and (acts <= {"score_bias"} or part.head_width == config.head_width)
    if acts and not alike:
        raise ValueError(
            f"block {name!r} has an attention of {heads} heads of width {part.head_width}, but position"
            f" {config.position.type!r} acts inside {config.num_attention_heads} heads of width {config.head_width};"
            f" set `head_dim={part.head_width}` if their number is the same, or use a position at the input such as"
            " 'sinusoidal_absolute'."
        )
    if changed and "parts" not in config.attention.head_options:
        raise ValueError(
            f"block {name!r} gives attention other channels or heads than the rest of the model has, which"
            f" attention {config.attention.type!r} is not made for; use 'dense'."
        )
    if changed:
        config.attention.check(part)
