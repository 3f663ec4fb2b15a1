# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: `kimi_linear` -> `xformer`. Kimi Delta Attention in most layers and multi-head latent attention in the
others, with experts as in DeepSeek-V3; no layer knows positions.

transformers' model has a projection of its own for logits whatever `tie_word_embeddings` says.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rules import Operation, Rule, copied
from . import expert_layers, llama
from .deepseek_v3 import FIELDS, WIDTHS, attention_rules
from .qwen3_next import TAPS, by_kind, kinds

LINEAR, FULL = "kimi_delta_attention", "multi_head_latent_attention"
RATES = Operation("flattened", lambda t: [t[0].flatten()], lambda t: [t[0].view(1, 1, -1, 1)], plain=True)
# Theirs and ours of layers with a state.
NAMES = {
    **{f"{x}_proj": f"{x}_proj" for x in "qkvo"},
    **{"b_proj": "beta_proj", "g_a_proj": "gate_down_proj", "g_b_proj": "gate_up_proj", "o_norm": "output_norm"},
    **{"forget_gate.f_a_proj": "decay_down_proj", "forget_gate.f_b_proj": "decay_up_proj"},
}
KIND_OF_NETWORK = ("dense", "sparse")


def linear_rules(index: int) -> tuple[Rule, ...]:
    own, ours = f"@layers.{index}.self_attn", f"@trunk.layers.{index}.attention"
    return (
        *(copied(f"{own}.{theirs}.weight", f"{ours}.{mine}.weight") for theirs, mine in NAMES.items()),
        Rule((f"{own}.conv1d.weight",), (f"{ours}.short_conv.weight",), TAPS),
        Rule((f"{own}.forget_gate.A_log",), (f"{ours}.decay.A_log",), RATES),
        copied(f"{own}.forget_gate.dt_bias", f"{ours}.decay.dt_bias"),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for index in range(config.num_hidden_layers):
        linear = config.layer(index).attention.type == LINEAR
        rules += linear_rules(index) if linear else attention_rules(config, index)
    return (*rules, *expert_layers.rules(config, shared="shared_experts"), *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    """Our fields.

    Raises:
        ValueError: keys for fewer heads than queries, another activation than SiLU, no shared network, or a type of
            layer that does not convert.
    """
    llama.refuse_other(config, num_key_value_heads=config.num_attention_heads, tie_word_embeddings=False)
    if not config.n_shared_experts:
        raise ValueError(f"n_shared_experts={config.n_shared_experts!r} does not convert; there is one at least.")
    unknown = [kind for kind in config.mlp_layer_types if kind not in KIND_OF_NETWORK]
    if unknown:
        raise ValueError(f"mlp_layer_types has {unknown[0]!r}, which does not convert; 'dense' and 'sparse' do.")
    full = {"type": FULL, "bias": config.attention_bias, **{name: getattr(config, name) for name in WIDTHS}}
    linear = {
        **{"type": LINEAR, "key_heads": config.linear_num_heads, "value_heads": config.linear_num_heads},
        **{"key_width": config.linear_head_dim, "value_width": config.linear_head_dim},
        "conv": config.linear_conv_kernel_dim,
    }
    networks = expert_layers.networks(
        config,
        [kind == "sparse" for kind in config.mlp_layer_types],
        num_experts=config.num_local_experts,
        expert_size=config.moe_intermediate_size,
        shared_size=config.n_shared_experts * config.moe_intermediate_size,
        scale=config.routed_scaling_factor,
        scores="sigmoid",
        normalize=config.norm_topk_prob,
        groups=config.n_group,
        kept_groups=config.topk_group,
        balance_rate=0.0,
    )
    return {**llama.DECODER, **llama.by_layer(by_kind(config, full, linear), networks), "position": "none"}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    (full, linear, names), spec = kinds(config, LINEAR), expert_layers.experts_of(config)
    size = spec.expert_size or config.intermediate_size
    counts = expert_layers.count_fields(config)
    widths = {} if full is None else {name: getattr(full, name) for name in WIDTHS}
    return {
        **widths,
        "hidden_act": counts["hidden_act"],
        "attention_bias": full is not None and full.bias,
        "layer_types": names,
        "mlp_layer_types": [KIND_OF_NETWORK[sparse] for sparse in expert_layers.sparse_layers(config)],
        "num_key_value_heads": config.num_attention_heads,
        **({} if linear is None else {"linear_num_heads": linear.key_heads, "linear_head_dim": linear.key_width}),
        **({} if linear is None else {"linear_conv_kernel_dim": linear.conv}),
        "num_experts_per_tok": spec.topk,
        "num_local_experts": spec.num_experts,
        "n_shared_experts": (spec.shared_size or 0) // size,
        "moe_intermediate_size": size,
        "routed_scaling_factor": spec.scale,
        "norm_topk_prob": spec.normalize,
        "n_group": spec.groups,
        "topk_group": spec.kept_groups,
    }


CONVERTER = register(
    Converter(
        model_type="kimi_linear",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("KimiLinear", sequence=False, token=False, spans=None),
        components={**llama.COMPONENTS, "attention": (LINEAR, FULL), "position": ("none",)},
        per_layer=True,
        unread=("pretraining_tp",),
    )
)
