# SPDX-License-Identifier: Apache-2.0
"""GPT-BigCode (SantaCoder, StarCoder): `gpt_bigcode` <-> a free mix with one head of keys and values (`xformer`).

Without `position_ids`, transformers counts padding on the left as positions and ours does not; with the position ids
that `generate` makes, the two agree.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rules import Rule, copied, fused_by_head
from .gpt2 import FIELDS
from .gpt_neo import TASKS


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    theirs, ours = "@h.{i}", "@trunk.layers.{i}"
    groups = config.key_value_heads
    return (
        copied("@wte.weight", "@trunk.embedding.tokens.weight"),
        copied("@wpe.weight", "@trunk.position.table.weight"),
        copied(f"{theirs}.ln_1.*", f"{ours}.attention_residual.norm.*"),
        fused_by_head(
            f"{theirs}.attn.c_attn.*",
            *(f"{ours}.attention.{name}_proj.*" for name in "qkv"),
            groups=groups,
            queries=config.num_attention_heads // groups,
        ),
        copied(f"{theirs}.attn.c_proj.*", f"{ours}.attention.o_proj.*"),
        copied(f"{theirs}.ln_2.*", f"{ours}.feedforward_residual.norm.*"),
        copied(f"{theirs}.mlp.c_fc.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{theirs}.mlp.c_proj.*", f"{ours}.feedforward.down_proj.*"),
        copied("@ln_f.*", "@trunk.final_norm.*"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "is_decoder": True,
        "num_key_value_heads": 1 if config.multi_query else None,
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "attention": {"type": "dense", "scale": None if config.scale_attn_weights else 1.0},
        "residual": "pre_ln",
        "feedforward": feedforward(config.activation_function),
        "head": "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    inner = config.intermediate_size
    return {
        "multi_query": config.num_key_value_heads == 1,
        "n_inner": None if inner == 4 * config.hidden_size else inner,
        "scale_attn_weights": config.attention.scale is None,
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="gpt_bigcode",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
            "sequence": TASKS["sequence"],
            "token": TASKS["token"],
        },
        heads=decoder_heads("GPTBigCode", "transformer.", spans=None),
        # Names and defaults of one activation, one width; the precision of a softmax, here always float32.
        unread=("n_inner", "activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        training_only=("embd_pdrop",),
        native=False,
        components={
            "position": ("learned_absolute",),
            "attention": ("dense",),
            "residual": ("pre_ln",),
            "block": ("vanilla",),
        },
    )
)
