# SPDX-License-Identifier: Apache-2.0
"""T5 (v1.0 and v1.1) and mT5: `t5` and `mt5` <-> `xf_t5`; what their relatives have in common with them.

transformers says whether decoder outputs are scaled by hidden_size^-0.5 (`scale_decoder_outputs`, v1.0), and ties the
output projection unless a checkpoint brings one of its own (v1.1). Here the first is the head's `scale`, the second
`tie_word_embeddings`. mT5 never scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied, only_theirs, shared
from .bart import HIDDEN, HIDDEN_HEAD

FIELDS = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_dropout_prob": "dropout_rate",
    "classifier_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_factor": "initializer_factor",
}


def attention(theirs: str, ours: str) -> tuple[Rule, ...]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    return tuple(copied(f"{theirs}.{a}.weight", f"{ours}.{b}.weight") for a, b in names.items())


def dense_feedforward(theirs: str, ours: str, gated: bool) -> tuple[Rule, ...]:
    names = {"wi_0": "gate_proj", "wi_1": "up_proj"} if gated else {"wi": "up_proj"}
    names["wo"] = "down_proj"
    return tuple(copied(f"{theirs}.{a}.weight", f"{ours}.{b}.weight") for a, b in names.items())


def around_layers(theirs: str, ours: str) -> tuple[Rule, ...]:
    """The bias that all layers share, and the last norm."""
    first_attention = f"@{theirs}.block.0.layer.0.SelfAttention"
    return (
        # the first layer's table serves all layers
        copied(f"{first_attention}.relative_attention_bias.weight", f"@{ours}.position.table.weight"),
        copied(f"@{theirs}.final_layer_norm.weight", f"@{ours}.final_norm.0.weight"),
    )


def attentions(theirs: str, ours: str, layer: str, *, cross: bool) -> tuple[Rule, ...]:
    """The attention sublayers of every layer."""
    block, mine = f"@{theirs}.block.{layer}.layer", f"@{ours}.layers.{layer}"
    reading = (
        *attention(f"{block}.1.EncDecAttention", f"{mine}.cross_attention"),
        copied(f"{block}.1.layer_norm.weight", f"{mine}.cross_attention_residual.norm.weight"),
    )
    return (
        *attention(f"{block}.0.SelfAttention", f"{mine}.attention"),
        copied(f"{block}.0.layer_norm.weight", f"{mine}.attention_residual.norm.weight"),
        *(reading if cross else ()),
    )


def tower(theirs: str, ours: str, layer: str, *, cross: bool, gated: bool) -> tuple[Rule, ...]:
    """The rules of one tower without its positions; `layer`: its placeholder."""
    last = f"@{theirs}.block.{layer}.layer.{2 if cross else 1}"
    mine = f"@{ours}.layers.{layer}"
    return (
        *attentions(theirs, ours, layer, cross=cross),
        *dense_feedforward(f"{last}.DenseReluDense", f"{mine}.feedforward", gated),
        copied(f"{last}.layer_norm.weight", f"{mine}.feedforward_residual.norm.weight"),
    )


def token_table(config: XFormerConfig) -> Rule:
    """The token table, which stands under a name for each tower."""
    theirs: tuple[str, ...] = ("@shared.weight", "@encoder.embed_tokens.weight")
    ours: tuple[str, ...] = ("@trunk.embedding.tokens.weight",)
    if config.is_encoder_decoder:
        theirs, ours = (*theirs, "@decoder.embed_tokens.weight"), (*ours, "@decoder.embedding.tokens.weight")
    return shared(theirs, ours)


def encoder(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        token_table(config),
        *around_layers("encoder", "trunk"),
        *tower("encoder", "trunk", "{i}", cross=False, gated=config.feedforward.gated),
    )


def decoder(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        *around_layers("decoder", "decoder"),
        *tower("decoder", "decoder", "{j}", cross=True, gated=config.feedforward.gated),
    )


def bias(config: PreTrainedConfig) -> dict[str, Any]:
    """Our position component."""
    return {
        "type": "t5_relative_bias",
        "num_buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
    }


def bias_to_theirs(config: XFormerConfig) -> dict[str, Any]:
    """Their fields for it; their defaults where the position is another, which is refused for that."""
    return {
        "relative_attention_num_buckets": getattr(config.position, "num_buckets", 32),
        "relative_attention_max_distance": getattr(config.position, "max_distance", 128),
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {**towers_to_ours(config), "head": {"type": "linear", "scale": config.scale_decoder_outputs}}


def towers_to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that all relatives have."""
    own_width = config.d_kv * config.num_heads != config.d_model
    return {
        "head_dim": config.d_kv if own_width else None,
        "num_decoder_layers": config.num_decoder_layers,
        "attention_probs_dropout_prob": config.dropout_rate,
        "activation_dropout_prob": config.dropout_rate,
        "is_encoder_decoder": config.is_encoder_decoder,
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None),
        "position": bias(config),
        "feedforward": feedforward(config.dense_act_fn, gated=config.is_gated_act, bias=False),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    name, gated = activation(config.feedforward)
    if gated:  # "gated-gelu" is their name for the tanh form
        name = {"gelu_new": "gated-gelu", "gelu": "gated-gelu_python"}.get(name, f"gated-{name}")
    dropout = config.classifier_dropout
    # no field of theirs, but generation reads it where it is set
    start = {} if config.bos_token_id is None else {"bos_token_id": config.bos_token_id}
    return {
        **start,
        "d_kv": config.head_width,
        "num_decoder_layers": config.num_decoder_layers,
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
        "is_encoder_decoder": config.is_encoder_decoder,
        "decoder_start_token_id": config.decoder_start_token_id,
        **bias_to_theirs(config),
        "feed_forward_proj": name,
        # their way to say that outputs are not scaled; whether tables are tied shows in the weights
        "tie_word_embeddings": getattr(config.head, "scale", True),
    }


BOTH = ("encoder", "decoder")

CONVERTER = register(
    Converter(
        model_type="t5",
        variant="xf_t5",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "encoder": encoder,
            "decoder": decoder,
            "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
            "sequence": HIDDEN_HEAD,
            "spans": (copied("qa_outputs.*", "classifier.*"),),
            "token": (only_theirs("classifier.*"),),
        },
        required=BOTH,
        heads=(
            Head("T5Model", "Model", "", BOTH, two_towers=True),
            Head("T5EncoderModel", "Model", "", ("encoder",), two_towers=False),
            Head("T5ForConditionalGeneration", "ForSeq2SeqLM", "", (*BOTH, "lm")),
            Head(
                "T5ForSequenceClassification",
                "ForSequenceClassification",
                "transformer.",
                (*BOTH, "sequence"),
                settings=HIDDEN,
            ),
            Head("T5ForQuestionAnswering", "ForQuestionAnswering", "", (*BOTH, "spans")),
            # the variant has no head for tokens: its encoder is kept
            Head("T5ForTokenClassification", "Model", "transformer.", ("encoder", "token"), two_towers=False),
        ),
        # `to_ours` reads the activation by its parts
        unread=("feed_forward_proj", "num_decoder_layers"),
        unread_ours=("max_position_embeddings",),
        ties_by_weights=True,
    )
)


def _mt5_to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {**towers_to_ours(config), "head": {"type": "linear", "scale": False}}


def renamed(name: str) -> tuple[Head, ...]:
    """T5's class pairs for a relative whose classes start with `name`."""
    return tuple(dataclasses.replace(head, theirs=name + head.theirs.removeprefix("T5")) for head in CONVERTER.heads)


register(dataclasses.replace(CONVERTER, model_type="mt5", native=False, to_ours=_mt5_to_ours, heads=renamed("MT5")))
