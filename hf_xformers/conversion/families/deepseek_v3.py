# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: `deepseek_v3` -> `xformer`. Multi-head latent attention, and experts with a shared one in all
layers but the first.

The layers for several tokens ahead that published files have are left behind, as transformers' classes do. The biases
by which experts are chosen stay as they are in training, too (`balance_rate` 0).
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, joined_by_group
from . import expert_layers, llama

FIELDS = {mine: theirs for mine, theirs in llama.FIELDS.items() if mine != "num_key_value_heads"}
COMPONENTS = {**llama.COMPONENTS, "attention": ("multi_head_latent_attention",)}
WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def attention_rules(config: XFormerConfig, index: int | None = None) -> tuple[Rule, ...]:
    """Of all layers, or of one."""
    layer, spec = "{i}" if index is None else index, config.layer(index or 0).attention
    own, ours = f"@layers.{layer}.self_attn", f"@trunk.layers.{layer}.attention"
    queries: tuple[Rule, ...] = (copied(f"{own}.q_proj.weight", f"{ours}.q_proj.weight"),)
    if spec.q_lora_rank is not None:
        queries = (
            llama.linear(f"{own}.q_a_proj", f"{ours}.q_down_proj", spec.bias),
            copied(f"{own}.q_a_layernorm.weight", f"{ours}.q_down_norm.weight"),
            copied(f"{own}.q_b_proj.weight", f"{ours}.q_proj.weight"),
        )
    return (
        *queries,
        llama.linear(f"{own}.kv_a_proj_with_mqa", f"{ours}.kv_down_proj", spec.bias),
        copied(f"{own}.kv_a_layernorm.weight", f"{ours}.kv_down_norm.weight"),
        joined_by_group(
            f"{own}.kv_b_proj.weight",
            (f"{ours}.k_proj.weight", f"{ours}.v_proj.weight"),
            config.num_attention_heads,
            (spec.qk_nope_head_dim, spec.v_head_dim),
            "fused key and value of each head",
        ),
        llama.linear(f"{own}.o_proj", f"{ours}.o_proj", spec.has_output_bias),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    experts = expert_layers.rules(config, shared="shared_experts")
    return (*attention_rules(config), *experts, *llama.frame(config))


def attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Our attention.

    Raises:
        ValueError: keys for fewer heads than queries.
    """
    llama.refuse_other(config, num_key_value_heads=config.num_attention_heads)
    widths = {name: getattr(config, name) for name in WIDTHS}
    return {
        **{"type": "multi_head_latent_attention", "bias": config.attention_bias, **widths},
        "scale": scale(config.rope_parameters, config.qk_nope_head_dim + config.qk_rope_head_dim),
    }


def scale(parameters: dict[str, Any], width: int) -> float | None:
    """The factor on scores where a stretched rotation has one of its own (`mscale_all_dim`)."""
    if parameters.get("rope_type", "default") == "default" or not parameters.get("mscale_all_dim"):
        return None
    stretched = 0.1 * parameters["mscale_all_dim"] * math.log(max(parameters["factor"], 1.0)) + 1.0
    return width**-0.5 * stretched**2


def experts(config: PreTrainedConfig, **fields: Any) -> list[dict[str, Any]]:
    """Our feed-forward components of all layers.

    Raises:
        ValueError: no network is shared.
    """
    if not config.n_shared_experts:
        raise ValueError(f"n_shared_experts={config.n_shared_experts!r} does not convert; there is one at least.")
    sparse = [index >= config.first_k_dense_replace for index in range(config.num_hidden_layers)]
    return expert_layers.networks(
        config,
        sparse,
        num_experts=config.n_routed_experts,
        expert_size=config.moe_intermediate_size,
        shared_size=config.n_shared_experts * config.moe_intermediate_size,
        scale=config.routed_scaling_factor,
        **fields,
    )


def fields_of_layers(config: XFormerConfig) -> dict[str, Any]:
    """Their fields that our attention and experts say.

    Raises:
        ValueError: layers with and without experts are mixed.
    """
    spec, latent, sparse = (
        expert_layers.experts_of(config),
        config.layer(0).attention,
        expert_layers.sparse_layers(config),
    )
    dense, size = sparse.count(False), spec.expert_size or config.intermediate_size
    if any(sparse[:dense]):
        raise ValueError("Experts before a layer without them have no counterpart: the first layers alone have none.")
    if spec.shared_size is None or spec.shared_size % size:
        raise ValueError(
            f"shared_size={spec.shared_size!r} has no counterpart: it is a multiple of `expert_size` {size}."
        )
    counts = expert_layers.count_fields(config)
    return {
        "hidden_act": counts["hidden_act"],
        "num_experts_per_tok": spec.topk,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.shared_size // size,
        "moe_intermediate_size": size,
        "routed_scaling_factor": spec.scale,
        "first_k_dense_replace": dense,
        "num_key_value_heads": config.num_attention_heads,
        "attention_bias": latent.bias,
        **{name: getattr(latent, name) for name in WIDTHS},
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    layout = "interleaved" if config.rope_interleave else "half"
    networks = experts(
        config,
        scores="sigmoid",
        normalize=config.norm_topk_prob,
        groups=config.n_group,
        kept_groups=config.topk_group,
        balance_rate=0.0,
    )
    return {
        **llama.DECODER,
        **llama.by_layer([attention(config)] * config.num_hidden_layers, networks),
        "position": {"type": "rotary", "layout": layout, **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec, layout = expert_layers.experts_of(config), getattr(config.position, "layout", "half")
    return {
        **fields_of_layers(config),
        "norm_topk_prob": spec.normalize,
        "n_group": spec.groups,
        "topk_group": spec.kept_groups,
        "rope_interleave": layout == "interleaved",
        "rope_parameters": rope_parameters(rotary_of(config, layout)),
    }


CONVERTER = register(
    Converter(
        model_type="deepseek_v3",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("DeepseekV3", spans=None),
        components=COMPONENTS,
        per_layer=True,
        # what no code there reads, and the layers that its classes leave behind
        unread=("rope_parameters", "pretraining_tp", "num_mtp_layers"),
    )
)
