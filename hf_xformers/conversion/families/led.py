# SPDX-License-Identifier: Apache-2.0
"""LED: `led` <-> `xf_longformer` with two towers, a BART whose encoder is a Longformer.

What BART's text says holds here, too. The decoder reads everything in both. Global tokens are the input
`global_attention_mask` alone: no head chooses any. transformers pads texts to a multiple of the window, which no real
token sees.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, register
from ..rules import Rule, copied
from . import bart, longformer

FIELDS = {name: theirs for name, theirs in bart.FIELDS.items() if name != "max_position_embeddings"}


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    layer, mine = "@encoder.layers.{i}", "@trunk.layers.{i}"
    attention, ours = f"{layer}.self_attn.longformer_self_attn", f"{mine}.attention"
    names = {"query": "q", "key": "k", "value": "v"}
    return (
        *bart.token_tables(config),
        *bart.around_layers("encoder", "trunk", config),
        *(copied(f"{attention}.{a}.*", f"{ours}.{b}_proj.*") for a, b in names.items()),
        *(copied(f"{attention}.{a}_global.*", f"{ours}.{b}_global_proj.*") for a, b in names.items()),
        copied(f"{layer}.self_attn.output.*", f"{ours}.o_proj.*"),
        copied(f"{layer}.self_attn_layer_norm.*", f"{mine}.attention_residual.norm.*"),
        *bart.dense_feedforward(layer, mine),
        *bart.tower("decoder", "decoder", "{j}", config.tower("decoder"), cross=True),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    fields = bart.to_ours(
        config,
        position="learned_absolute",
        attention=longformer.attention(config),
        head={"type": "linear", "bias": True},
    )
    longest = config.max_encoder_position_embeddings, config.max_decoder_position_embeddings
    other = {} if longest[0] == longest[1] else {"max_position_embeddings": longest[1]}
    return {
        **fields,
        "max_position_embeddings": longest[0],
        "decoder": {**(fields["decoder"] or {}), **other} or None,
        "type_vocab_size": 0,
        "sep_token_id": None,  # by which a head for questions would choose global tokens
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    fields = bart.to_theirs(config)
    del fields["scale_embedding"], fields["is_decoder"]
    return {
        **fields,
        "max_encoder_position_embeddings": config.max_position_embeddings,
        "max_decoder_position_embeddings": config.tower_configs()[-1].max_position_embeddings,
        "attention_window": longformer.windows(config),
    }


CONVERTER = register(
    Converter(
        model_type="led",
        variant="xf_longformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**bart.GROUPS, "backbone": _backbone},
        heads=tuple(
            head
            for head in bart.heads("LED", prefix="led.")
            if head.theirs in ("LEDModel", "LEDForConditionalGeneration", "LEDForQuestionAnswering")
        ),
        # one number stands for as many windows as there are layers
        unread=("activation_function", "attention_window"),
        training_only=bart.LAYER_DROPS,
    )
)
