# SPDX-License-Identifier: Apache-2.0
"""BigBird-Pegasus: `bigbird_pegasus` <-> the free mix, an mBART whose encoder is a BigBird.

What BART's and BigBird's texts say holds here, too. The one norm of a tower, its last, has the name
`layernorm_embedding` there. Projections of attention have biases all, or none (`use_bias`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, register
from ..rules import Rule, copied
from . import bart, big_bird


def _tower(theirs: str, ours: str, layer: str, bias: bool, *, cross: bool) -> tuple[Rule, ...]:
    """A decoder's rules; `layer`: its placeholder."""
    their_layer, our_layer = f"@{theirs}.layers.{layer}", f"@{ours}.layers.{layer}"
    return (
        *_around_layers(theirs, ours),
        *bart.sublayer(their_layer, our_layer, "self_attn", "attention", bias=bias),
        *(bart.sublayer(their_layer, our_layer, "encoder_attn", "cross_attention", bias=bias) if cross else ()),
        *bart.dense_feedforward(their_layer, our_layer),
    )


def _around_layers(theirs: str, ours: str) -> tuple[Rule, ...]:
    return (
        copied(f"@{theirs}.embed_positions.weight", f"@{ours}.position.table.weight"),
        copied(f"@{theirs}.layernorm_embedding.*", f"@{ours}.final_norm.*"),
    )


def _encoder(bias: bool) -> tuple[Rule, ...]:
    layer, mine, end = "@encoder.layers.{i}", "@trunk.layers.{i}", "*" if bias else "weight"
    names = {"self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj", "output": "o_proj"}
    return (
        *_around_layers("encoder", "trunk"),
        *(copied(f"{layer}.self_attn.{a}.{end}", f"{mine}.attention.{b}.{end}") for a, b in names.items()),
        copied(f"{layer}.self_attn_layer_norm.*", f"{mine}.attention_residual.norm.*"),
        *bart.dense_feedforward(layer, mine),
    )


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    bias = config.attention.bias
    if not config.is_encoder_decoder:
        table = copied("@decoder.embed_tokens.weight", "@trunk.embedding.tokens.weight")
        return (table, *_tower("decoder", "trunk", "{i}", bias, cross=False))
    return (
        *bart.token_tables(config),
        *_encoder(bias),
        *_tower("decoder", "decoder", "{j}", bias, cross=True),
    )


def _cross(config: XFormerConfig) -> tuple[Rule, ...]:
    return bart.unread_cross(config, bias=config.attention.bias)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    dense = {"type": "dense", "bias": config.use_bias}
    fields = bart.to_ours(
        config,
        embedding={"type": "token", "scale": bool(config.scale_embedding)},
        position="learned_absolute",
        attention=dense,
        cross_attention=dense,
        residual="pre_ln",
        head={"type": "linear", "bias": True},
    )
    if not config.is_encoder_decoder:
        return {**fields, "head": "linear"}
    return {
        **fields,
        "attention": {**big_bird.attention(config), "bias": config.use_bias},
        "decoder": {**(fields["decoder"] or {}), "attention": dense},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **bart.to_theirs(config),
        **big_bird.attention_to_theirs(config),
        "use_bias": config.attention.bias,
    }


CONVERTER = register(
    Converter(
        model_type="bigbird_pegasus",
        variant="xformer",
        native=False,
        components={"position": ("learned_absolute",), "residual": ("pre_ln",), "attention": ("bigbird", "dense")},
        fields=bart.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**bart.GROUPS, "backbone": _backbone, "cross": _cross},
        heads=bart.heads("BigBirdPegasus"),
        # a decoder by itself reads everything
        unread_alone=(*bart.CONVERTER.unread_alone, "attention_type", "block_size", "num_random_blocks"),
        unread=("activation_function",),
        training_only=bart.LAYER_DROPS,
        remarks=big_bird.remarks,
    )
)
