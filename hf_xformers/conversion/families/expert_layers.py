# SPDX-License-Identifier: Apache-2.0
"""What decoders with gated experts share: which layers have them, and their tensors. No family of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ...feedforward.deepseek_moe import DeepSeekSpec
from ..activations import feedforward
from ..rules import Rule, copied
from . import llama

TYPE = "deepseek_moe"
# Of their config, where the loss that balances experts is added only on demand (`output_router_logits`), and over all
# layers at once.
TRAINING = ("router_aux_loss_coef",)


def experts(config: PreTrainedConfig, **fields: Any) -> dict[str, Any]:
    """Our component with their number of experts, of which each token asks some, without biases for their choice."""
    return {
        "type": TYPE,
        "num_experts": getattr(config, "num_experts", None),
        "topk": config.num_experts_per_tok,
        "activation": config.hidden_act,
        "scores": "softmax",
        "balance_rate": None,
        **fields,
    }


def experts_of(config: XFormerConfig) -> DeepSeekSpec:
    """The first experts of a config.

    Raises:
        ValueError: no layer has any.
    """
    for index in range(config.num_hidden_layers):
        spec = config.layer(index).feedforward
        if isinstance(spec, DeepSeekSpec):
            return spec
    raise ValueError(f"A model without {TYPE!r} feed-forward has no counterpart: layers of this family have experts.")


def sparse_layers(config: XFormerConfig) -> list[bool]:
    """Which layers have experts."""
    views = [config.layer(index) for index in range(config.num_hidden_layers)]
    return [view.feedforward.type == TYPE and view.feedforward.is_sparse(view, i) for i, view in enumerate(views)]


def networks(config: PreTrainedConfig, sparse: list[bool], **fields: Any) -> list[dict[str, Any]]:
    """Our feed-forward components of all layers, with [`experts`] where they are sparse and Llama's network else."""
    dense = feedforward(config.hidden_act, gated=True, bias=False)
    return [experts(config, **fields) if found else dense for found in sparse]


def rules(config: XFormerConfig, shared: str = "shared_expert") -> tuple[Rule, ...]:
    """Of the feed-forward components of all layers. shared: their name of the network that all tokens share."""
    made: list[Rule] = []
    for index, sparse in enumerate(sparse_layers(config)):
        view, own, ours = config.layer(index), f"@layers.{index}.mlp", f"@trunk.layers.{index}.feedforward"
        if not sparse:
            made += llama.network_rules(view, str(index))
            continue
        spec = view.feedforward
        made += [
            copied(f"{own}.gate.weight", f"{ours}.router.weight"),
            *(copied(f"{own}.experts.{x}_proj", f"{ours}.experts.{x}_proj") for x in ("gate_up", "down")),
        ]
        if spec.balance_rate is not None:
            made.append(copied(f"{own}.gate.e_score_correction_bias", f"{ours}.balance.bias"))
        if spec.shared_size is not None:
            names = [f"{x}_proj.weight" for x in ("gate", "up", "down")]
            made += [copied(f"{own}.{shared}.{name}", f"{ours}.shared.{name}") for name in names]
        if spec.shared_gate:
            made.append(copied(f"{own}.{shared}_gate.weight", f"{ours}.shared_gate.weight"))
    return tuple(made)


def steps(config: PreTrainedConfig) -> list[bool]:
    """Which layers have experts by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    return [index not in dense and config.num_experts > 0 and (index + 1) % step == 0 for index in layers]


def step_fields(config: XFormerConfig) -> dict[str, Any]:
    """The inverse of [`steps`]."""
    sparse = sparse_layers(config)
    for step in range(1, len(sparse) + 1):
        if sparse == [(index + 1) % step == 0 for index in range(len(sparse))]:
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, found in enumerate(sparse) if not found]}


def count_fields(config: XFormerConfig) -> dict[str, Any]:
    """Their fields that our experts say."""
    spec = experts_of(config)
    return {"hidden_act": spec.activation, "num_experts_per_tok": spec.topk, "num_experts": spec.num_experts}
