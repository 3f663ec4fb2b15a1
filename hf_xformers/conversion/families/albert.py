# SPDX-License-Identifier: Apache-2.0
"""ALBERT: `albert` <-> `xf_albert`, whose stack `universal` runs its layers again and again.

`num_hidden_layers` counts runs here, which are `inner_group_num` times the steps that it counts there. Class 0 of
transformers' sentence-order head is the original order, as of our head for pairs of texts.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, register
from ..rules import Rule, copied, first
from .bert import CLASSIFIERS, COMPONENTS, EMBEDDINGS, FIELDS, refuse_relative_positions
from .bert import CONVERTER as BERT


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    refuse_relative_positions(config)
    return {
        "num_hidden_layers": config.num_hidden_layers * config.inner_group_num,
        "embedding": {"type": "factorized", "width": config.embedding_size, "narrow_positions": True},
        "stack": {
            "type": "universal",
            "layers_per_step": config.inner_group_num,
            "groups": config.num_hidden_groups,
            "step_signal": "none",
            "position_signal": False,
        },
        "add_pooler": True,
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    stack: Any = config.stack
    rate = config.classifier_dropout
    return {
        "num_hidden_layers": config.num_hidden_layers // stack.layers_per_step,
        "inner_group_num": stack.layers_per_step,
        "num_hidden_groups": stack.groups,
        "hidden_act": activation(config.feedforward)[0],
        "embedding_size": config.embedding.table_width(config),
        "classifier_dropout_prob": config.hidden_dropout_prob if rate is None else rate,
    }


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    inner = getattr(config.stack, "layers_per_step", 1)
    rules = [*EMBEDDINGS, copied("@encoder.embedding_hidden_mapping_in.*", "@trunk.embedding.proj.*")]
    for index in range(config.stack.num_layers(config)):
        theirs = f"@encoder.albert_layer_groups.{index // inner}.albert_layers.{index % inner}"
        ours = f"@trunk.layers.{index}"
        rules += [
            copied(f"{theirs}.attention.query.*", f"{ours}.attention.q_proj.*"),
            copied(f"{theirs}.attention.key.*", f"{ours}.attention.k_proj.*"),
            copied(f"{theirs}.attention.value.*", f"{ours}.attention.v_proj.*"),
            copied(f"{theirs}.attention.dense.*", f"{ours}.attention.o_proj.*"),
            copied(f"{theirs}.attention.LayerNorm.*", f"{ours}.attention_residual.norm.*"),
            copied(f"{theirs}.ffn.*", f"{ours}.feedforward.up_proj.*"),
            copied(f"{theirs}.ffn_output.*", f"{ours}.feedforward.down_proj.*"),
            copied(f"{theirs}.full_layer_layer_norm.*", f"{ours}.feedforward_residual.norm.*"),
        ]
    return tuple(rules)


CONVERTER = register(
    Converter(
        model_type="albert",
        variant="xf_albert",
        fields={
            mine: theirs
            for mine, theirs in FIELDS.items()
            if mine not in ("num_hidden_layers", "classifier_dropout", "is_decoder")
        }
        | {"classifier_dropout": "classifier_dropout_prob"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "pooler": (copied("@pooler.*", "@pooler.dense.*"),),
            # the token table again, as a rule: present where the rest of the head is not
            "projection": (copied("predictions.decoder.weight", "lm_head.decoder.weight"),),
            "mlm": (
                copied("predictions.dense.*", "lm_head.dense.*"),
                copied("predictions.LayerNorm.*", "lm_head.norm.*"),
                first(("predictions.decoder.bias", "predictions.bias"), "lm_head.decoder.bias"),
            ),
            "pair": (copied("sop_classifier.classifier.*", "classifier.*"),),
            **CLASSIFIERS,
        },
        heads=tuple(
            head.renamed("Bert", "Albert", "albert.")
            for head in BERT.heads
            if head.ours not in ("ForCausalLM", "ForNextSentencePrediction")
        ),
        unread=("hidden_act",),
        components=COMPONENTS | {"embedding": ("factorized",), "stack": ("universal",)},
    )
)
