# SPDX-License-Identifier: Apache-2.0
"""NEZHA: `nezha` -> `xf_bert` with the positions of Shaw et al., whose vectors are sinusoids; one way, since
transformers has no class for it any more.

Wei et al. 2019 (arXiv 1909.00204), section 2.1: the vectors a_ij of keys and of values are the same, fixed and the
sinusoids of the clipped distance. Here they are the starting values of tables, which a further training changes unless
it is told not to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import register
from ..layouts.nezha import CLASSES
from ..rules import Operation, Rule, only_theirs, sinusoids
from . import bert

_ENCODING = "@encoder.layer.{i}.attention.self.relative_positions_encoding.positions_encoding"


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    width = config.hidden_size // config.num_attention_heads
    if width % 2:
        raise ValueError(
            f"A 'nezha' model with heads of width {width} does not convert: its sinusoids need an even one."
        )
    position = {"type": "shaw_relative", "max_distance": config.max_relative_position, "values": True}
    return {**bert.to_ours(config), "position": position}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {**bert.to_theirs(config), "max_relative_position": getattr(config.position, "max_distance", 64)}


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    reach = getattr(config.position, "max_distance", 64)
    # row r is for the distance r - reach
    made = Operation(
        "sinusoids of distances", lambda _: [sinusoids(2 * reach + 1, config.head_width)[None]], lambda _: []
    )
    terms = "@trunk.layers.{i}.attention.position_terms"
    shared = (rule for rule in bert.BACKBONE if "position_embeddings" not in rule.theirs[0])
    return (*shared, *(Rule((), (f"{terms}.{name}_table",), made) for name in ("key", "value")))


CONVERTER = register(
    dataclasses.replace(
        bert.CONVERTER,
        model_type="nezha",
        fields=bert.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**bert.CONVERTER.groups, "backbone": _backbone, "encodings": (only_theirs(_ENCODING),)},
        heads=tuple(
            dataclasses.replace(head.renamed("Bert", "Nezha", "nezha."), groups=(*head.groups, "encodings"))
            for head in bert.CONVERTER.heads
            if head.ours != "ForCausalLM"
        ),
        native=False,
        layouts=CLASSES,
    )
)
