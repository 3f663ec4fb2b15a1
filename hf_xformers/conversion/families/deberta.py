# SPDX-License-Identifier: Apache-2.0
"""DeBERTa, first version: `deberta` <-> `xf_deberta`.

Query, key and value have one projection there, head by head, and keys no bias. What is said of the second version's
head for masked tokens holds here, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import register
from ..rules import Operation, Rule, copied, zero
from . import deberta_v2


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return deberta_v2.common_to_ours(config, {})


def by_head(config: XFormerConfig) -> Operation:
    """[H * 3 * d, D] whose rows are the query, the key and the value of the first head, of the second, ..."""
    heads, width = config.num_attention_heads, config.head_width

    def split(tensors: list[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1).contiguous() for part in tensors[0].view(heads, 3, width, -1).unbind(1)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack([part.unflatten(0, (heads, width)) for part in tensors], dim=1).flatten(0, 2)]

    return Operation("query, key and value by head", split, join)


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    position, _ = deberta_v2.relative_part(config)
    theirs, ours = "@encoder.layer.{i}.attention.self", "@trunk.layers.{i}.attention"
    projections = tuple(f"{ours}.{name}_proj.weight" for name in "qkv")
    rules = [
        *deberta_v2.common_rules(config),
        Rule((f"{theirs}.in_proj.weight",), projections, by_head(config)),
        copied(f"{theirs}.q_bias", f"{ours}.q_proj.bias"),
        copied(f"{theirs}.v_bias", f"{ours}.v_proj.bias"),
        zero(f"{ours}.k_proj.bias"),
    ]
    if "c2p" in position.terms:
        rules.append(copied(f"{theirs}.pos_proj.weight", f"{ours}.position_terms.key_proj.weight"))
    if "p2c" in position.terms:
        rules.append(copied(f"{theirs}.pos_q_proj.*", f"{ours}.position_terms.query_proj.*"))
    return tuple(rules)


CONVERTER = register(
    dataclasses.replace(
        deberta_v2.CONVERTER,
        model_type="deberta",
        to_ours=to_ours,
        to_theirs=deberta_v2.common_to_theirs,
        groups={**deberta_v2.CONVERTER.groups, "backbone": _backbone},
        heads=tuple(
            head.renamed("DebertaV2", "Deberta", "deberta.")
            for head in deberta_v2.CONVERTER.heads
            if head.ours != "ForMultipleChoice"
        ),
        native=False,
    )
)
