# SPDX-License-Identifier: Apache-2.0
"""Switch Transformers: `switch_transformers` <-> `xf_switch_transformer`.

transformers bounds an expert by a number of tokens of a row (`expert_capacity`), in evaluation too and in every call
by itself: while it generates, a call has one token. Ours does the same, except that padding takes no place in an
expert's queue; there, padding on the left does. transformers adds its router losses to the loss only where a call asks
for them (`output_router_logits=True`), counts padding in them and leaves out those of a tower whose layers are all
sparse; ours always adds its own.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied, stacked
from . import t5

FIELDS = {name: theirs for name, theirs in t5.FIELDS.items() if name != "classifier_dropout"}
STEPS = {"trunk": "num_sparse_encoder_layers", "decoder": "num_sparse_decoder_layers"}


def sparse_layers(layers: int, step: int) -> list[bool]:
    """Which layers transformers gives experts for a sparse step."""
    return [step == 1 or (step > 0 and index % step == 1) for index in range(layers)]


def _step(layers: int, sparse: int) -> int:
    """transformers' sparse step for a number of sparse layers."""
    return layers // sparse if sparse > 0 else layers


def placed(sparse: list[bool], experts: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Fields of a tower with `experts` in its sparse layers and `dense` in the others."""
    if not any(sparse):
        return {"feedforward": dense}
    if all(sparse):
        return {"feedforward": {**experts, "every": 1}}
    if sparse == [index % 2 == 1 for index in range(len(sparse))]:
        return {"feedforward": {**experts, "every": 2}}
    return {
        "feedforward": {**experts, "every": 1},
        "per_layer_config": {index: {"feedforward": dense} for index, found in enumerate(sparse) if not found},
    }


def sparse_in(tower: XFormerConfig, kind: str) -> list[bool]:
    """Which layers of a tower of ours have experts; kind: the component's name."""
    views = [tower.layer(index) for index in range(tower.num_hidden_layers)]
    return [view.feedforward.type == kind and view.feedforward.is_sparse(view, i) for i, view in enumerate(views)]


def _number(tower: XFormerConfig, name: str) -> int:
    """transformers' number of sparse layers that gives this tower's.

    Raises:
        ValueError: none does.
    """
    sparse, layers = sparse_in(tower, "switch_transformer"), tower.num_hidden_layers
    for number in (sum(sparse), *range(layers + 2)):
        if sparse_layers(layers, _step(layers, number)) == sparse:
            return number
    where = [index for index, found in enumerate(sparse) if found]
    raise ValueError(
        f"Experts in the layers {where} of {layers} have no counterpart: no {name} of transformers does so."
    )


def _tower(theirs: str, ours: str, config: XFormerConfig, layer: str, *, cross: bool) -> tuple[Rule, ...]:
    rules = [*t5.around_layers(theirs, ours), *t5.attentions(theirs, ours, layer, cross=cross)]
    for index, sparse in enumerate(sparse_in(config, "switch_transformer")):
        block = f"@{theirs}.block.{index}.layer.{2 if cross else 1}"
        mine = f"@{ours}.layers.{index}.feedforward"
        rules.append(copied(f"{block}.layer_norm.weight", f"{mine}_residual.norm.weight"))
        if not sparse:
            rules += t5.dense_feedforward(f"{block}.mlp", mine, gated=False)
            continue
        experts = [
            f"{block}.mlp.experts.expert_{number}" for number in range(config.layer(index).feedforward.num_experts)
        ]
        rules += [
            copied(f"{block}.mlp.router.classifier.weight", f"{mine}.router.weight"),
            stacked(tuple(f"{name}.wi.weight" for name in experts), f"{mine}.experts.up_proj"),
            stacked(tuple(f"{name}.wo.weight" for name in experts), f"{mine}.experts.down_proj"),
        ]
    return tuple(rules)


def _encoder(config: XFormerConfig) -> tuple[Rule, ...]:
    return (t5.token_table(config), *_tower("encoder", "trunk", config.tower("trunk"), "{i}", cross=False))


def _decoder(config: XFormerConfig) -> tuple[Rule, ...]:
    if not config.is_encoder_decoder:
        return ()
    return _tower("decoder", "decoder", config.tower("decoder"), "{j}", cross=True)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    own_width = config.d_kv * config.num_heads != config.d_model
    experts = {
        "type": "switch_transformer",
        "num_experts": config.num_experts,
        "expert_capacity": config.expert_capacity,
        "capacity_factor": None,
        "jitter": config.router_jitter_noise,
        "balance_loss_weight": config.router_aux_loss_coef,
        "z_loss_weight": config.router_z_loss_coef,
        "activation": config.dense_act_fn,
    }
    towers = {}
    for tower, layers in (("trunk", config.num_layers), ("decoder", config.num_decoder_layers)):
        sparse = sparse_layers(layers, _step(layers, getattr(config, STEPS[tower])))
        dense = {} if all(sparse) else feedforward(config.dense_act_fn, bias=False)
        towers[tower] = placed(sparse, experts, dense)
    return {
        **towers["trunk"],
        "decoder": towers["decoder"] if config.is_encoder_decoder else None,
        "head_dim": config.d_kv if own_width else None,
        "num_decoder_layers": config.num_decoder_layers,
        "attention_probs_dropout_prob": config.dropout_rate,
        "activation_dropout_prob": config.dropout_rate,
        "is_encoder_decoder": config.is_encoder_decoder,
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None),
        "position": t5.bias(config),
        "head": {"type": "linear", "scale": config.tie_word_embeddings},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    towers = config.tower_configs()
    kinds = [view.feedforward for tower in towers for view in tower.layer_configs()]
    experts = next((spec for spec in kinds if spec.type == "switch_transformer"), None)
    if experts is None:
        raise ValueError("A model without experts is no 'switch_transformers' model; convert it as 'mt5' or 't5'.")
    if experts.expert_capacity is None:
        raise ValueError(
            "expert_capacity=None has no counterpart: experts of transformers' Switch models take a number of tokens"
            " of a text; set `expert_capacity`, and no factors."
        )
    start = {} if config.bos_token_id is None else {"bos_token_id": config.bos_token_id}
    return {
        **start,
        **{STEPS[name]: _number(tower, STEPS[name]) for name, tower in zip(STEPS, towers)},
        "d_kv": config.head_width,
        "num_decoder_layers": config.num_decoder_layers,
        "is_encoder_decoder": config.is_encoder_decoder,
        "decoder_start_token_id": config.decoder_start_token_id,
        **t5.bias_to_theirs(config),
        "num_experts": experts.num_experts,
        "expert_capacity": experts.expert_capacity,
        "router_jitter_noise": experts.jitter,
        "router_aux_loss_coef": experts.balance_loss_weight,
        "router_z_loss_coef": experts.z_loss_weight,
        "dense_act_fn": experts.activation,
    }


BOTH = ("encoder", "decoder")

CONVERTER = register(
    Converter(
        model_type="switch_transformers",
        variant="xf_switch_transformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "encoder": _encoder,
            "decoder": _decoder,
            "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
        },
        required=BOTH,
        heads=(
            Head("SwitchTransformersModel", "Model", "", BOTH, two_towers=True),
            Head("SwitchTransformersForConditionalGeneration", "ForSeq2SeqLM", "", (*BOTH, "lm"), two_towers=True),
            # its config still speaks of two towers
            Head(
                "SwitchTransformersEncoderModel",
                "Model",
                "",
                ("encoder",),
                two_towers=False,
                settings={"is_encoder_decoder": False},
            ),
        ),
        per_layer=True,
        # what `to_ours` reads by itself (several numbers mean the same layers), and what no code there reads
        unread=(
            "num_decoder_layers",
            *STEPS.values(),
            "router_ignore_padding_tokens",
            "add_router_probs",
        ),
        unread_ours=("max_position_embeddings",),
    )
)
