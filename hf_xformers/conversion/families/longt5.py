# SPDX-License-Identifier: Apache-2.0
"""LongT5: `longt5` <-> the free mix, a T5 whose encoder reads a band of tokens, and perhaps summaries of blocks.

Blocks of transient global attention (`encoder_attention_type="transient-global"`) begin at a text's first real token;
in transformers they do where the padding in front of it begins, which becomes part of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Head, register
from ..rules import Rule, copied
from . import t5, umt5

# transformers' name for each kind of attention, and that of its sublayer
KINDS = {
    "band_attention": ("local", "LocalSelfAttention"),
    "transient_global": ("transient-global", "TransientGlobalSelfAttention"),
}


def _encoder(config: XFormerConfig) -> tuple[Rule, ...]:
    name = KINDS[config.attention.type][1]
    rules = [
        dataclasses.replace(
            rule, theirs=tuple(theirs.replace(".SelfAttention.", f".{name}.") for theirs in rule.theirs)
        )
        for rule in t5.encoder(config)
    ]
    if config.attention.type == "transient_global":
        theirs, ours = f"@encoder.block.{{}}.layer.0.{name}", "@trunk.layers.{}.attention"
        rules += [
            copied(
                f"{theirs.format('{i}')}.global_input_layer_norm.weight", f"{ours.format('{i}')}.summary_norm.weight"
            ),
            # the first layer's table serves all layers
            copied(f"{theirs.format(0)}.global_relative_attention_bias.weight", f"{ours.format(0)}.block_bias.weight"),
        ]
    return tuple(rules)


def _attention(config: PreTrainedConfig) -> dict[str, Any]:
    if config.encoder_attention_type == "local":
        return {**umt5.DENSE, "type": "band_attention", "window_size": config.local_radius}
    return {
        **umt5.DENSE,
        "type": "transient_global",
        "window_size": config.local_radius,
        "block_size": config.global_block_size,
        "num_buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **t5.to_ours(config),
        **umt5.COMPONENTS,
        "attention": _attention(config),
        "decoder": {"attention": umt5.DENSE} if config.is_encoder_decoder else None,
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    attention = config.attention
    if attention.type not in KINDS:
        raise ValueError(
            f"attention {attention.type!r} in the encoder has no counterpart in transformers: 'longt5' models have"
            f" {' or '.join(map(repr, KINDS))} there."
        )
    width = attention.window_size
    if not isinstance(width, int):
        raise ValueError(f"window_size={width!r} has no counterpart: all layers of a 'longt5' model have one radius.")
    fields = {**t5.to_theirs(config), "local_radius": width, "encoder_attention_type": KINDS[attention.type][0]}
    del fields["classifier_dropout"]
    if attention.type == "transient_global":
        fields["global_block_size"] = attention.block_size
    return fields


CONVERTER = register(
    dataclasses.replace(
        t5.CONVERTER,
        model_type="longt5",
        variant="xformer",
        native=False,
        components={
            "position": ("t5_relative_bias",),
            "residual": ("pre_ln",),
            "attention": ("band_attention", "transient_global", "dense"),
        },
        fields={name: theirs for name, theirs in t5.FIELDS.items() if name != "classifier_dropout"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={name: t5.CONVERTER.groups[name] for name in ("decoder", "lm")} | {"encoder": _encoder},
        heads=(
            Head("LongT5Model", "Model", "", t5.BOTH, two_towers=True),
            Head("LongT5ForConditionalGeneration", "ForSeq2SeqLM", "", (*t5.BOTH, "lm"), two_towers=True),
            # its config still speaks of two towers
            Head("LongT5EncoderModel", "Model", "", ("encoder",), two_towers=False, settings=umt5.ONE_TOWER),
        ),
        # read by one kind of attention alone, which `to_ours` asks
        unread=(*t5.CONVERTER.unread, "global_block_size"),
    )
)
