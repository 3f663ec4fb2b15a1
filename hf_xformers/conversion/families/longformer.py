# SPDX-License-Identifier: Apache-2.0
"""Longformer: `longformer` <-> `xf_longformer`.

Positions count from `pad_token_id + 1`, as in RoBERTa. transformers pads texts to a multiple of the window, which no
real token sees. Its classifier of texts makes the first place of a row global, ours the first real token: they agree
where rows are not padded on the left. Questions and choices need exactly three separators in every row there.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, register
from ..rules import copied
from . import roberta
from .bert import BACKBONE, FIELDS

GLOBAL = tuple(
    copied(
        f"@encoder.layer.{{i}}.attention.self.{theirs}_global.*", f"@trunk.layers.{{i}}.attention.{ours}_global_proj.*"
    )
    for theirs, ours in {"query": "q", "key": "k", "value": "v"}.items()
)


def attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Our attention component."""
    window = config.attention_window
    widths = [window] if isinstance(window, int) else list(window)
    return {"type": "longformer", "attention_window": widths[0] if len(set(widths)) == 1 else tuple(widths)}


def windows(config: XFormerConfig) -> list[int]:
    """transformers' windows, one for each layer; its default where the attention is another, which is refused for
    that."""
    window = getattr(config.attention, "attention_window", 512)
    return list(window) if isinstance(window, tuple) else [window] * config.num_hidden_layers


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {**roberta.to_ours(config), "attention": attention(config)}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {**roberta.to_theirs(config), "attention_window": windows(config)}


CONVERTER = register(
    Converter(
        model_type="longformer",
        variant="xf_longformer",
        fields={
            **{
                mine: theirs
                for mine, theirs in FIELDS.items()
                if mine not in ("max_position_embeddings", "classifier_dropout", "is_decoder")
            },
            "sep_token_id": "sep_token_id",
        },
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**roberta.CONVERTER.groups, "backbone": (*BACKBONE, *GLOBAL)},
        heads=tuple(
            head.renamed("Roberta", "Longformer", "longformer.")
            for head in roberta.CONVERTER.heads
            if head.ours != "ForCausalLM"
        ),
        # one number stands for as many as there are layers
        unread=("hidden_act", "attention_window", "onnx_export"),
    )
)
