# SPDX-License-Identifier: Apache-2.0
"""GPT-J: `gptj` <-> a free mix with parallel sublayers behind one norm (`xformer`).

Without `position_ids`, transformers counts padding on the left as positions; rotary scores depend on distances alone,
so that outputs agree all the same.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rules import copied
from .gpt2 import FIELDS
from .gpt_neo import TASKS

BACKBONE = (
    copied("@wte.weight", "@trunk.embedding.tokens.weight"),
    copied("@h.{i}.ln_1.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    copied("@h.{i}.attn.q_proj.weight", "@trunk.layers.{i}.attention.q_proj.weight"),
    copied("@h.{i}.attn.k_proj.weight", "@trunk.layers.{i}.attention.k_proj.weight"),
    copied("@h.{i}.attn.v_proj.weight", "@trunk.layers.{i}.attention.v_proj.weight"),
    copied("@h.{i}.attn.out_proj.weight", "@trunk.layers.{i}.attention.o_proj.weight"),
    copied("@h.{i}.mlp.fc_in.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
    copied("@h.{i}.mlp.fc_out.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
    copied("@ln_f.*", "@trunk.final_norm.*"),
)


def part_of(channels: int, width: int) -> float:
    """The part of a head's width that comes to so many rotated channels, as `int(width * part)` counts them."""
    part = channels / width
    while int(width * part) < channels:
        part = math.nextafter(part, 1.0)
    return part


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    width = config.n_embd // config.n_head
    if not 0 < config.rotary_dim <= width:
        raise ValueError(
            f"A 'gptj' model with rotary_dim={config.rotary_dim!r} does not convert: its heads have {width} channels."
        )
    return {
        "is_decoder": True,
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "position": {"type": "rotary", "layout": "interleaved", "fraction": part_of(config.rotary_dim, width)},
        "attention": {"type": "dense", "bias": False},
        "block": {"type": "parallel", "shared_norm": True},
        "residual": "pre_ln",
        "feedforward": feedforward(config.activation_function),
        "head": {"type": "linear", "bias": True},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    inner = config.intermediate_size
    return {
        "n_inner": None if inner == 4 * config.hidden_size else inner,
        "rotary_dim": int(config.head_width * config.position.fraction),
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="gptj",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "lm": (copied("lm_head.*", "lm_head.decoder.*"),),
            "sequence": TASKS["sequence"],
            "spans": TASKS["spans"],
        },
        heads=decoder_heads("GPTJ", "transformer.", token=False),
        # `n_inner` may repeat the default; its value is checked as `intermediate_size`
        unread=("n_inner", "activation_function"),
        training_only=("embd_pdrop",),
        native=False,
        components={
            "position": ("rotary",),
            "attention": ("dense",),
            "residual": ("pre_ln",),
            "block": ("parallel",),
        },
    )
)
