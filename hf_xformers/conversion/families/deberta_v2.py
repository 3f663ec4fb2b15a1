# SPDX-License-Identifier: Apache-2.0
"""DeBERTa, second version (its settings of v2 and v3): `deberta-v2` <-> `xf_deberta`.

transformers predicts masked tokens from the last layer's states, without the paper's enhanced mask decoder: the stack
is `plain`. A masked language model with `legacy=False`, which always reads the token table, comes back with
`legacy=True`; a published checkpoint whose head is in that layout is read in it, whatever its config says.
The convolution next to the first layer of the largest models (v2-xlarge, v2-xxlarge) is the block `convolution`.
The bias of a relative key projection of its own adds the same to all scores of a query: ours has none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied
from .bert import CLASSIFIERS, FIELDS, LANGUAGE_HEAD


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    normed = [part.strip() for part in getattr(config, "norm_rel_ebd", "none").lower().split("|")]
    buckets = getattr(config, "position_buckets", -1)
    position = {
        "buckets": buckets if buckets > 0 else None,
        "share_projections": getattr(config, "share_att_key", False),
        "normalize": "layer_norm" in normed,
    }
    return {**common_to_ours(config, position), **_block(config)}


def _block(config: PreTrainedConfig) -> dict[str, Any]:
    """Our block, which is another than the usual one where a convolution stands next to the first layer."""
    kernel = getattr(config, "conv_kernel_size", 0)
    if not kernel > 0:
        return {}
    if kernel % 2 == 0:
        raise ValueError(
            f"A 'deberta-v2' model with conv_kernel_size={kernel!r} does not convert: an even kernel shortens the text"
            " there, and transformers cannot run it."
        )
    return {
        "block": {
            "type": "convolution",
            "kernel": kernel,
            "groups": getattr(config, "conv_groups", 1),
            "activation": getattr(config, "conv_act", "tanh"),
        }
    }


def _convolution(block: Any) -> dict[str, Any]:
    """Their fields for it as far as they are no defaults: their config does not declare them."""
    if block.type != "convolution":
        return {}
    usual = {"conv_groups": 1, "conv_act": "tanh"}
    found = {"conv_groups": block.groups, "conv_act": block.activation}
    return {"conv_kernel_size": block.kernel, **{name: x for name, x in found.items() if x != usual[name]}}


def common_to_ours(config: PreTrainedConfig, position: dict[str, Any]) -> dict[str, Any]:
    """What both versions have; position: fields of the position that are this version's own."""
    terms = tuple(config.pos_att_type or ())
    if not config.relative_attention or not terms or set(terms) - {"c2p", "p2c"}:
        raise ValueError(
            f"A {config.model_type!r} model with relative_attention={config.relative_attention!r} and"
            f" pos_att_type={config.pos_att_type!r} does not convert: xf_deberta has relative attention with 'c2p',"
            " 'p2c' or both."
        )
    width = config.hidden_size
    plain = {
        "embedding_size": (width, "its token table is narrower than its states"),
        "pooler_hidden_size": (width, "its pooler has a width of its own"),
        "attention_head_size": (width // config.num_attention_heads, "its heads have a width of their own"),
        "talking_head": (False, "its heads are mixed"),
    }
    for name, (value, reason) in plain.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(
                f"A {config.model_type!r} model with {name}={found!r} does not convert: {reason}, which xf_deberta has"
                " not."
            )
    relative = {
        "type": "deberta",
        "terms": terms,
        "max_distance": config.max_relative_positions if config.max_relative_positions > 0 else None,
        **position,
    }
    biased = {"type": "combined", "parts": ("learned_absolute", relative)}
    return {
        "stack": "plain",
        "classifier_dropout": getattr(config, "cls_dropout", None),
        "position": biased if config.position_biased_input else relative,
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
        "pooler_activation": activation_name(config.pooler_hidden_act),
    }


def relative_part(config: XFormerConfig) -> tuple[Any, str]:
    """The relative position and the name of its module; next to it there may be learned absolute positions.

    Raises:
        ValueError: there is none.
    """
    position: Any = config.position
    parts = position.parts if position.type == "combined" else (position,)
    if parts[-1].type != "deberta" or [part.type for part in parts[:-1]] not in ([], ["learned_absolute"]):
        raise ValueError(
            f"position={position.type!r} has no counterpart: every DeBERTa has 'deberta', or 'combined' of"
            " 'learned_absolute' and that."
        )
    return parts[-1], "@trunk.position" + (".parts.1" if len(parts) > 1 else "")


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    position, _ = relative_part(config)
    return common_to_theirs(config) | {
        "position_buckets": -1 if position.buckets is None else position.buckets,
        "share_att_key": position.share_projections,
        "norm_rel_ebd": "layer_norm" if position.normalize else "none",
        **_convolution(config.block),
    }


def common_to_theirs(config: XFormerConfig) -> dict[str, Any]:
    """What both versions have."""
    position, _ = relative_part(config)
    dropout = {} if config.classifier_dropout is None else {"cls_dropout": config.classifier_dropout}
    return {
        **dropout,
        "hidden_act": activation(config.feedforward)[0],
        "pooler_hidden_act": config.pooler_activation,
        "relative_attention": True,
        "position_biased_input": config.position.type == "combined",
        "pos_att_type": list(position.terms),
        "max_relative_positions": -1 if position.max_distance is None else position.max_distance,
    }


def common_rules(config: XFormerConfig) -> list[Rule]:
    """What both versions call alike."""
    _, module = relative_part(config)
    layer, ours = "@encoder.layer.{i}", "@trunk.layers.{i}"
    rules = [
        copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
        copied("@encoder.rel_embeddings.weight", f"{module}.table.weight"),
        copied(f"{layer}.attention.output.dense.*", f"{ours}.attention.o_proj.*"),
        copied(f"{layer}.attention.output.LayerNorm.*", f"{ours}.attention_residual.norm.*"),
        copied(f"{layer}.intermediate.dense.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{layer}.output.dense.*", f"{ours}.feedforward.down_proj.*"),
        copied(f"{layer}.output.LayerNorm.*", f"{ours}.feedforward_residual.norm.*"),
    ]
    if config.type_vocab_size:
        rules.append(copied("@embeddings.token_type_embeddings.weight", "@trunk.embedding.types.weight"))
    if config.position.type == "combined":
        rules.append(copied("@embeddings.position_embeddings.weight", "@trunk.position.parts.0.table.weight"))
    return rules


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    position, module = relative_part(config)
    layer, ours = "@encoder.layer.{i}", "@trunk.layers.{i}"
    rules = [
        *common_rules(config),
        *(
            copied(f"{layer}.attention.self.{name}_proj.*", f"{ours}.attention.{name[0]}_proj.*")
            for name in ("query", "key", "value")
        ),
    ]
    if position.normalize:
        rules.append(copied("@encoder.LayerNorm.*", f"{module}.norm.*"))
    if not position.share_projections:
        own = f"{ours}.attention.position_terms"
        if "c2p" in position.terms:
            rules.append(copied(f"{layer}.attention.self.pos_key_proj.weight", f"{own}.key_proj.weight"))
            idle = Operation("idle bias", lambda _: [], lambda _: [torch.zeros(config.hidden_size)])
            rules.append(Rule((f"{layer}.attention.self.pos_key_proj.bias",), (), idle))
        if "p2c" in position.terms:
            rules.append(copied(f"{layer}.attention.self.pos_query_proj.*", f"{own}.query_proj.*"))
    if config.block.type == "convolution":
        first_layer = "@trunk.layers.0.convolution"
        rules.append(copied("@encoder.conv.conv.*", f"{first_layer}.conv.*"))
        rules.append(copied("@encoder.conv.LayerNorm.*", f"{first_layer}_residual.norm.*"))
    return tuple(rules)


POOLED = {"add_pooler": True}

CONVERTER = register(
    Converter(
        model_type="deberta-v2",
        variant="xf_deberta",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine not in ("classifier_dropout", "is_decoder")},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "pooler": (copied("pooler.dense.*", "@pooler.dense.*"),),
            **LANGUAGE_HEAD,
            **CLASSIFIERS,
        },
        heads=(
            Head("DebertaV2Model", "Model", "", ("backbone",)),
            Head("DebertaV2ForMaskedLM", "ForMaskedLM", "deberta.", ("backbone", "projection", "mlm")),
            Head(
                "DebertaV2ForSequenceClassification",
                "ForSequenceClassification",
                "deberta.",
                ("backbone", "pooler", "sequence"),
                settings=POOLED,
            ),
            Head("DebertaV2ForTokenClassification", "ForTokenClassification", "deberta.", ("backbone", "token")),
            Head("DebertaV2ForQuestionAnswering", "ForQuestionAnswering", "deberta.", ("backbone", "spans")),
            Head(
                "DebertaV2ForMultipleChoice",
                "ForMultipleChoice",
                "deberta.",
                ("backbone", "pooler", "choice"),
                settings=POOLED,
            ),
        ),
        # The layout of `legacy=False`, in the names that the rules speak of.
        renamed={
            "lm_predictions.lm_head.dense.weight": ("cls.predictions.transform.dense.weight",),
            "lm_predictions.lm_head.dense.bias": ("cls.predictions.transform.dense.bias",),
            "lm_predictions.lm_head.LayerNorm.weight": ("cls.predictions.transform.LayerNorm.weight",),
            "lm_predictions.lm_head.LayerNorm.bias": ("cls.predictions.transform.LayerNorm.bias",),
            "lm_predictions.lm_head.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        },
        layout={"legacy": False},
        unread=("hidden_act", "pooler_hidden_act", "pos_att_type", "max_relative_positions", "legacy"),
        training_only=("pooler_dropout",),
    )
)
