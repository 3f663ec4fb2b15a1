# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: `mamba2` <-> `xf_mamba2`.

transformers keeps time steps within `time_step_limit` in whole texts, and forgets to where it writes token by token;
with `use_bias` its convolution reads the biases of padding on the left. Ours does neither.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...attention.mamba2 import Mamba2Spec
from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rules import Rule, copied, joined
from .llama import linear, refuse_other
from .qwen3_next import TAPS

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_heads",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_epsilon",
}


def mixer_rules(own: str, ours: str, spec: Mamba2Spec, config: XFormerConfig) -> tuple[Rule, ...]:
    """Of one mixer, theirs and ours."""
    (_, groups, heads), bias = spec.heads(config), ("weight", "bias") if spec.bias else ("weight",)
    states, inner = groups * spec.key_size(config), heads * spec.value_size(config)
    return (
        *(
            joined(
                f"{own}.in_proj.{kind}",
                tuple(f"{ours}.{x}_proj.{kind}" for x in ("gate", "v", "k", "q", "decay")),
                (inner, inner, states, states, heads),
                "fused gate, value, key, query and time step",
            )
            for kind in bias
        ),
        Rule((f"{own}.conv1d.weight",), (f"{ours}.short_conv.weight",), TAPS),
        copied(f"{own}.conv1d.bias", f"{ours}.short_conv.bias"),
        copied(f"{own}.A_log", f"{ours}.decay.A_log"),
        copied(f"{own}.dt_bias", f"{ours}.decay.dt_bias"),
        copied(f"{own}.D", f"{ours}.skip.D"),
        *(() if spec.gate_norm == "none" else (copied(f"{own}.norm.weight", f"{ours}.output_norm.weight"),)),
        linear(f"{own}.out_proj", f"{ours}.o_proj", spec.has_output_bias),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        copied("@embeddings.weight", "@trunk.embedding.tokens.weight"),
        copied("@layers.{i}.norm.weight", "@trunk.layers.{i}.attention_residual.norm.weight"),
        *mixer_rules("@layers.{i}.mixer", "@trunk.layers.{i}.attention", config.attention, config),
        copied("@norm_f.weight", "@trunk.final_norm.weight"),
    )


def bounds_of_steps(config: PreTrainedConfig) -> dict[str, float | None]:
    """Our fields for `time_step_limit`.

    Raises:
        ValueError: bounds that are none.
    """
    if config.time_step_limit is None:
        raise ValueError("time_step_limit=None does not convert: give the bounds, such as (0.0, inf).")
    least, most = config.time_step_limit
    if not 0 <= least <= most or not most > 0:
        raise ValueError(
            f"time_step_limit={config.time_step_limit!r} does not convert: it has to be 0 <= least <= most."
        )
    return {"least_step": least, "most_step": None if math.isinf(most) else most}


def step_limit(spec: Mamba2Spec) -> tuple[float, float]:
    """The inverse of [`bounds_of_steps`]."""
    return float(spec.least_step), math.inf if spec.most_step is None else float(spec.most_step)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    """Our fields.

    Raises:
        ValueError: another activation, a convolution without biases, or bounds of time steps that are none.
    """
    refuse_other(config, hidden_act="silu", use_conv_bias=True)
    return {
        "is_decoder": True,
        "head_dim": config.head_dim,
        "attention": {
            "type": "mamba2",
            "key_heads": config.n_groups,
            "key_width": config.state_size,
            "conv": config.conv_kernel,
            "bias": config.use_bias,
            **bounds_of_steps(config),
            "chunk_size": config.chunk_size,
        },
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    """Their fields.

    Raises:
        ValueError: heads together are no multiple of the residual stream.
    """
    spec = config.attention
    inner = config.num_attention_heads * config.head_width
    if inner % config.hidden_size:
        raise ValueError(
            f"{config.num_attention_heads} heads of width {config.head_width} have no counterpart: together they are a"
            f" multiple of hidden_size={config.hidden_size}."
        )
    return {
        "head_dim": config.head_width,
        "expand": inner // config.hidden_size,
        "n_groups": spec.heads(config)[1],
        "state_size": spec.key_size(config),
        "conv_kernel": spec.conv,
        "use_bias": spec.bias,
        "time_step_limit": step_limit(spec),
        "chunk_size": spec.chunk_size,
    }


def remarks(config: PreTrainedConfig) -> tuple[str, ...]:
    if not config.residual_in_fp32 or config.dtype in (None, torch.float32):
        return ()
    return ("residual_in_fp32=True: what layers add up to is kept in the dtype of the model here",)


CONVERTER = register(
    Converter(
        model_type="mamba2",
        variant="xf_mamba2",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={"backbone": backbone, "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),)},
        heads=decoder_heads("Mamba2", "backbone.", sequence=False, token=False, spans=None),
        # of fresh weights, and how bounds are written
        unread=(
            *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
            *("time_step_limit", "residual_in_fp32"),
        ),
        unread_ours=("intermediate_size", "max_position_embeddings", "feedforward"),
        components={"attention": ("mamba2",)},
        remarks=remarks,
    )
)
