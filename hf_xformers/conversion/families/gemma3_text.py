# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text: `gemma3_text` -> `xformer`. Gemma 2 with normalized queries and keys in place of capped scores.

Layers with a sliding window turn by another theta than those that read everything. transformers reads no
`attn_logit_softcapping` here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule
from . import gemma2, llama
from .qwen2 import KINDS, layers
from .qwen3 import NORMS


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*gemma2.backbone(config), *NORMS)


def position(config: PreTrainedConfig) -> dict[str, Any]:
    """Our rotary position for layers of two kinds."""
    full, sliding = (rotation_fields(config.rope_parameters[kind]) for kind in KINDS)
    return {
        "type": "rotary",
        "theta": full["theta"],
        "scaling": full["scaling"],
        "local_theta": sliding["theta"],
        "local_scaling": sliding["scaling"],
    }


def rotations(config: XFormerConfig) -> dict[str, dict[str, Any]]:
    """The inverse of [`position`].

    Raises:
        ValueError: layers with a window turn as the others do, or the reverse.
    """
    spec = rotary_of(config)
    for index in range(config.num_hidden_layers):
        attention = config.layer(index).attention
        wanted = "global" if attention.type == "dense" else "local"
        if attention.angles != wanted:
            raise ValueError(
                f"angles={attention.angles!r} of layer {index} has no counterpart: attention {attention.type!r} turns"
                f" by the {wanted} rotation there."
            )
    return {kind: rope_parameters(spec, local=local) for kind, local in zip(KINDS, (False, True), strict=True)}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    llama.refuse_other(config, attn_logit_softcapping=None)
    if config.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention=True does not convert: its windows have two sides.")
    of_all = {"bias": config.attention_bias, "query_key_norm": "head", **gemma2.scale(config)}
    return {
        **gemma2.DECODER,
        **layers(config, of_all, {"angles": "local"}),
        "head_dim": config.head_dim,
        "head": {"type": "linear", "cap": config.final_logit_softcapping},
        "feedforward": feedforward(config.hidden_activation, gated=True, bias=False),
        "position": position(config),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **gemma2.fields_of_attention(config),
        **gemma2.activation_fields(config),
        "final_logit_softcapping": getattr(config.head, "cap", None),
        "rope_parameters": rotations(config),
    }


CONVERTER = register(
    Converter(
        model_type="gemma3_text",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Gemma3", token=False, spans=None, stem="Gemma3Text"),
        components=gemma2.COMPONENTS,
        per_layer=True,
        unread=("hidden_activation", "rope_parameters", "sliding_window", "use_bidirectional_attention"),
    )
)
