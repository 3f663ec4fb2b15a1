# SPDX-License-Identifier: Apache-2.0
"""Funnel-Transformer: `funnel` <-> `xf_funnel_transformer`, with the layers after up-sampling or without ("base").

transformers pools padding with the token before it, ours does not: the two agree in rows without padding. Its two
attention types are two ways to the same numbers. Its queries have no bias; ours, where it is not zero, adds to the
three biases that queries meet keys with. `hidden_states` here end with the last layer's; theirs have the up-sampled
state among them, one more. Where a config names a padding token,
transformers empties its row of the token table with every loading.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ...core.components import Spec
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied
from .electra import DISCRIMINATING, DISCRIMINATOR

FIELDS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "activation_dropout_prob": "activation_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}
JOINT_TYPE = 2  # of their [CLS]


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    own_width = config.d_head * config.n_head != config.d_model
    return {
        "head_dim": config.d_head if own_width else None,
        "num_hidden_layers": sum(config.block_sizes) + config.num_decoder_layers,
        "type_vocab_size": 0,
        "add_pooler": True,
        "pooler_activation": "tanh",
        "embedding": {"type": "token", "normalize": True},
        "position": "none",
        "attention": {
            "type": "transformer_xl",
            "share_biases": False,
            "segments": True,
            "joint_type": JOINT_TYPE,
        },
        "feedforward": feedforward(config.hidden_act),
        "stack": {
            "type": "funnel",
            "block_sizes": tuple(config.block_sizes),
            "block_repeats": tuple(config.block_repeats),
            "pooling": config.pooling_type,
            "pool_query_only": config.pool_q_only,
            "separate_cls": config.separate_cls,
            "truncate": config.truncate_seq,
            "decoder_layers": config.num_decoder_layers,
        },
        "head": {"type": "linear", "bias": True},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    stack = config.stack
    if stack.type != "funnel":
        raise ValueError(f"stack {stack.type!r} has no counterpart in transformers: 'funnel' models have 'funnel'.")
    after = 2 if stack.decoder_layers is None else stack.decoder_layers
    return {
        "d_head": config.head_width,
        "hidden_act": activation(config.feedforward)[0],
        "block_sizes": list(stack.blocks(config)),
        "block_repeats": list(stack.repeats(config)),
        "num_decoder_layers": stack.after(config) if stack.upsample else after,
        "pooling_type": stack.pooling,
        "pool_q_only": stack.pool_query_only,
        "separate_cls": stack.separate_cls,
        "truncate_seq": stack.truncate,
    }


def _stack(upsample: bool):
    """The stack of a model with the layers after up-sampling, or without."""

    def stack(config: XFormerConfig) -> Spec:
        if config.stack.type != "funnel":
            return config.stack
        return dataclasses.replace(config.stack, upsample=upsample)

    return stack


def _depth(config: XFormerConfig) -> int:
    """Layers of a model that does not up-sample."""
    return sum(config.stack.blocks(config)) if config.stack.type == "funnel" else config.num_hidden_layers


FULL = {"stack": _stack(True)}
# the number of layers after the stack that says how many blocks have
BASE = {"stack": _stack(False), "num_hidden_layers": _depth}


def _positions(heads: int) -> Operation:
    """Their kernel [D, H, d] and our projection [H d, D]."""
    return Operation(
        "laid out by heads",
        lambda t: [t[0].flatten(1).t().contiguous()],
        lambda t: [t[0].t().unflatten(1, (heads, -1)).contiguous()],
        plain=True,
    )


def _with_query_bias(t: list[Tensor]) -> list[Tensor]:
    return [bias + t[0].view_as(bias) for bias in t[1:]]


# (q + b + u) k = (q + (b + u)) k, and so on
BIASES = Operation("query bias in the others", lambda t: [torch.zeros(t[0].numel()).to(t[0]), *t], _with_query_bias)


def _layer(theirs: str, ours: str, heads: int) -> tuple[Rule, ...]:
    attention, mine = f"{theirs}.attention", f"{ours}.attention"
    return (
        copied(f"{attention}.q_head.weight", f"{mine}.q_proj.weight"),
        copied(f"{attention}.k_head.*", f"{mine}.k_proj.*"),
        copied(f"{attention}.v_head.*", f"{mine}.v_proj.*"),
        copied(f"{attention}.post_proj.*", f"{mine}.o_proj.*"),
        Rule((f"{attention}.r_kernel",), (f"{mine}.r_proj.weight",), _positions(heads)),
        Rule(
            (f"{attention}.r_w_bias", f"{attention}.r_r_bias", f"{attention}.r_s_bias"),
            (f"{mine}.q_proj.bias", f"{mine}.content_bias", f"{mine}.position_bias", f"{mine}.segment_bias"),
            BIASES,
        ),
        copied(f"{attention}.seg_embed", f"{mine}.segment_table"),
        copied(f"{attention}.layer_norm.*", f"{ours}.attention_residual.norm.*"),
        copied(f"{theirs}.ffn.linear_1.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{theirs}.ffn.linear_2.*", f"{ours}.feedforward.down_proj.*"),
        copied(f"{theirs}.ffn.layer_norm.*", f"{ours}.feedforward_residual.norm.*"),
    )


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules = [
        copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        copied("@embeddings.layer_norm.*", "@trunk.embedding.norm.*"),
    ]
    names = [f"encoder.blocks.{b}.{n}" for b, size in enumerate(config.stack.blocks(config)) for n in range(size)]
    names += [f"decoder.layers.{n}" for n in range(config.stack.after(config))]
    for index, name in enumerate(names):
        rules += _layer(f"@{name}", f"@trunk.layers.{index}", config.num_attention_heads)
    return tuple(rules)


HIDDEN_LAYER = (copied("classifier.linear_hidden.*", "@pooler.dense.*"),)
WITH_HIDDEN_LAYER = (copied("classifier.linear_out.*", "classifier.*"),)

CONVERTER = register(
    Converter(
        model_type="funnel",
        variant="xf_funnel_transformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "mlm": (copied("lm_head.*", "lm_head.decoder.*"),),
            "hidden": HIDDEN_LAYER,
            **dict.fromkeys(("sequence", "choice"), WITH_HIDDEN_LAYER),
            "token": (copied("classifier.*", "classifier.*"),),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
            "discriminator": DISCRIMINATOR,
        },
        heads=(
            Head("FunnelModel", "Model", "", ("backbone",), settings={**FULL, "add_pooler": False}),
            Head("FunnelBaseModel", "Model", "", ("backbone",), settings={**BASE, "add_pooler": False}),
            Head("FunnelForMaskedLM", "ForMaskedLM", "funnel.", ("backbone", "mlm"), settings=FULL),
            Head(
                "FunnelForSequenceClassification",
                "ForSequenceClassification",
                "funnel.",
                ("backbone", "hidden", "sequence"),
                settings=BASE,
            ),
            Head(
                "FunnelForTokenClassification",
                "ForTokenClassification",
                "funnel.",
                ("backbone", "token"),
                settings=FULL,
            ),
            Head(
                "FunnelForQuestionAnswering", "ForQuestionAnswering", "funnel.", ("backbone", "spans"), settings=FULL
            ),
            Head(
                "FunnelForMultipleChoice",
                "ForMultipleChoice",
                "funnel.",
                ("backbone", "hidden", "choice"),
                settings=BASE,
            ),
            Head(
                "FunnelForPreTraining",
                "ForReplacedTokenDetection",
                "funnel.",
                ("backbone", "discriminator"),
                settings={**FULL, **DISCRIMINATING},
            ),
        ),
        unread=("hidden_act", "attention_type", "initializer_std"),
        # `to_theirs` reads the stack, and the class says whether it up-samples
        unread_ours=("stack", "num_hidden_layers", "max_position_embeddings"),
    )
)
