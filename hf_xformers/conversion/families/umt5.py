# SPDX-License-Identifier: Apache-2.0
"""UMT5: `umt5` <-> the free mix, a T5 with a table of position biases in every layer.

Releases of transformers whose config has no `scale_decoder_outputs` always scale outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Head, register
from ..rules import Rule, copied
from . import t5

DENSE = {"type": "dense", "bias": False, "scale": 1.0}
# What T5 has and the free mix has not by itself.
COMPONENTS: dict[str, Any] = {
    "initializer": "t5",
    "attention": DENSE,
    "cross_attention": DENSE,
    "normalization": "rms_norm",
    "residual": {"type": "pre_ln", "final_dropout": True},
}
ONE_TOWER = {"is_encoder_decoder": False}


def _around_layers(theirs: str, ours: str, layer: str) -> tuple[Rule, ...]:
    attention = f"@{theirs}.block.{layer}.layer.0.SelfAttention"
    return (
        copied(
            f"{attention}.relative_attention_bias.weight",
            f"@{ours}.layers.{layer}.attention.position_terms.table.weight",
        ),
        copied(f"@{theirs}.final_layer_norm.weight", f"@{ours}.final_norm.0.weight"),
    )


def _encoder(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        t5.token_table(config),
        *_around_layers("encoder", "trunk", "{i}"),
        *t5.tower("encoder", "trunk", "{i}", cross=False, gated=config.feedforward.gated),
    )


def _decoder(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        *_around_layers("decoder", "decoder", "{j}"),
        *t5.tower("decoder", "decoder", "{j}", cross=True, gated=config.feedforward.gated),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    fields = t5.towers_to_ours(config)
    return {
        **fields,
        **COMPONENTS,
        "position": {**fields["position"], "type": "t5_bias_per_layer"},
        "head": {"type": "linear", "scale": getattr(config, "scale_decoder_outputs", True)},
    }


CONVERTER = register(
    dataclasses.replace(
        t5.CONVERTER,
        model_type="umt5",
        variant="xformer",
        native=False,
        components={"position": ("t5_bias_per_layer",), "residual": ("pre_ln",)},
        to_ours=to_ours,
        groups={
            **t5.CONVERTER.groups,
            "encoder": _encoder,
            "decoder": _decoder,
            "token": (copied("classifier.*", "classifier.*"),),
        },
        heads=(
            *(head for head in t5.renamed("UMT5") if "Token" not in head.theirs and "Encoder" not in head.theirs),
            # their configs still speak of two towers
            Head("UMT5EncoderModel", "Model", "", ("encoder",), two_towers=False, settings=ONE_TOWER),
            Head(
                "UMT5ForTokenClassification",
                "ForTokenClassification",
                "transformer.",
                ("encoder", "token"),
                two_towers=False,
                settings=ONE_TOWER,
            ),
        ),
    )
)
