# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2: `deepseek_v2` -> `xformer`. Multi-head latent attention, and experts chosen by a softmax, with shared
ones, in all layers but the first."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import expert_layers, llama
from .deepseek_v3 import COMPONENTS, FIELDS, attention, backbone, experts, fields_of_layers

GROUPED = "group_limited_greedy"


def groups(config: PreTrainedConfig) -> dict[str, Any]:
    """Our fields for how experts are chosen.

    Raises:
        ValueError: a way that their model does not know.
    """
    if config.topk_method not in ("greedy", GROUPED):
        raise ValueError(f"topk_method={config.topk_method!r} does not convert; 'greedy' and {GROUPED!r} do.")
    if config.topk_method == "greedy" or config.n_group == 1:
        return {}
    return {"groups": config.n_group, "kept_groups": config.topk_group, "group_score": "best"}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    llama.refuse_other(config, mlp_bias=False)
    networks = experts(config, normalize=False, **groups(config))
    return {
        **llama.DECODER,
        **llama.by_layer([attention(config)] * config.num_hidden_layers, networks),
        "position": {"type": "rotary", "layout": "interleaved", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec = expert_layers.experts_of(config)
    return {
        **fields_of_layers(config),
        "topk_method": GROUPED if spec.groups > 1 else "greedy",
        "n_group": spec.groups,
        "topk_group": spec.kept_groups,
        "rope_parameters": rope_parameters(rotary_of(config, "interleaved")),
    }


CONVERTER = register(
    Converter(
        model_type="deepseek_v2",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("DeepseekV2", token=False, spans=None),
        components=COMPONENTS,
        per_layer=True,
        # what no code there reads, and how groups are chosen where there is no choice
        unread=("rope_parameters", "pretraining_tp", "norm_topk_prob", "topk_method", "n_group", "topk_group"),
    )
)
