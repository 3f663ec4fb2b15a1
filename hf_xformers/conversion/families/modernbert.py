# SPDX-License-Identifier: Apache-2.0
"""ModernBERT: `modernbert` -> `xformer`. Layers read all tokens or a window to both sides, and turn by a theta for
either kind; the first attention reads the normalized embedding as it is.

Its classifiers of texts read the first slot, padding or not, and ours the first real token: with padding on the left
the two differ.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied, joined, zero
from . import llama
from .gemma3_text import position, rotations
from .llama import linear
from .qwen2 import layer_types, layers

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "embedding_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "activation_dropout_prob": "mlp_dropout",
    "classifier_dropout": "classifier_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "norm_eps",
}
COMPONENTS = {
    **llama.COMPONENTS,
    "attention": ("dense", "band_attention"),
    "normalization": ("layer_norm",),
    "head": ("transform",),
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours, norm = "@layers.{i}", "@trunk.layers.{i}", config.normalization.bias
    attention, bias = config.layer(0).attention.bias, config.feedforward.bias
    rules: list[Rule] = [
        copied("@embeddings.tok_embeddings.weight", "@trunk.embedding.tokens.weight"),
        linear("@embeddings.norm", "@trunk.embedding.norm", norm),
        linear(f"{own}.attn.Wo", f"{ours}.attention.o_proj", attention),
        linear(f"{own}.mlp_norm", f"{ours}.feedforward_residual.norm", norm),
        linear(f"{own}.mlp.Wo", f"{ours}.feedforward.down_proj", bias),
        linear("@final_norm", "@trunk.final_norm", norm),
    ]
    for index in range(1, config.num_hidden_layers):  # the first has none
        rules.append(linear(f"@layers.{index}.attn_norm", f"@trunk.layers.{index}.attention_residual.norm", norm))
    for suffix in ("weight", "bias") if attention else ("weight",):
        parts = tuple(f"{ours}.attention.{x}_proj.{suffix}" for x in "qkv")
        widths = (config.hidden_size,) * 3
        rules.append(joined(f"{own}.attn.Wqkv.{suffix}", parts, widths, "fused query, key and value"))
    for suffix in ("weight", "bias") if bias else ("weight",):
        parts = tuple(f"{ours}.feedforward.{x}_proj.{suffix}" for x in ("gate", "up"))
        rules.append(joined(f"{own}.mlp.Wi.{suffix}", parts, (config.intermediate_size,) * 2, "fused gate and input"))
    return tuple(rules)


def _mlm(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        linear("head.dense", "lm_head.dense", config.classifier_bias),
        *(() if config.classifier_bias else (zero("lm_head.dense.bias"),)),  # our head always has one
        linear("head.norm", "lm_head.norm", config.normalization.bias),
        linear("decoder", "lm_head.decoder", config.head.bias),
    )


def _hidden(config: XFormerConfig) -> tuple[Rule, ...]:
    return (
        linear("head.dense", "transform.dense", config.classifier_bias),
        linear("head.norm", "transform.norm", config.normalization.bias),
    )


def _pooling(config: XFormerConfig) -> str:
    """What their `classifier_pooling` can say, of ours."""
    return config.classifier_pooling if config.classifier_pooling in ("auto", "mean") else "first"


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    llama.refuse_other(config, sparse_prediction=False)
    return {
        **layers(config, {"bias": config.attention_bias}, {"angles": "local"}),
        "type_vocab_size": 0,
        "embedding": {"type": "token", "normalize": True},
        "normalization": {"type": "layer_norm", "bias": config.norm_bias},
        "residual": {"type": "pre_ln", "first_norm": False},
        "head": {
            "type": "transform",
            "activation": activation_name(config.classifier_activation),
            "bias": config.decoder_bias,
        },
        "classifier_transform": "dense_norm",
        "classifier_activation": activation_name(config.classifier_activation),
        "classifier_bias": config.classifier_bias,
        "classifier_pooling": "mean" if config.classifier_pooling == "mean" else "first",
        "feedforward": feedforward(config.hidden_activation, gated=True, bias=config.mlp_bias),
        "position": position(config),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    kinds, window = layer_types(config)
    return {
        **llama.gated_activation(config, "hidden_activation"),
        "attention_bias": config.layer(0).attention.bias,
        "mlp_bias": config.feedforward.bias,
        "norm_bias": config.normalization.bias,
        "classifier_activation": getattr(config.head, "activation", "gelu"),
        "classifier_bias": config.classifier_bias,
        "classifier_pooling": "mean" if _pooling(config) == "mean" else "cls",
        "decoder_bias": config.head.bias,
        "layer_types": kinds,
        "rope_parameters": rotations(config),
        **({} if window is None else {"local_attention": 2 * window}),
    }


_OF_TOKENS: dict[str, Any] = {"prefix": "model.", "groups": ("backbone", "hidden", "labels")}
_OF_TEXTS: dict[str, Any] = {**_OF_TOKENS, "settings": {"add_pooler": False, "classifier_pooling": _pooling}}

CONVERTER = register(
    Converter(
        model_type="modernbert",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": backbone,
            "mlm": _mlm,
            "hidden": _hidden,
            "labels": (copied("classifier.*", "classifier.*"),),
        },
        heads=(
            Head("ModernBertModel", "Model", "", ("backbone",)),
            Head("ModernBertForMaskedLM", "ForMaskedLM", "model.", ("backbone", "mlm")),
            Head("ModernBertForSequenceClassification", "ForSequenceClassification", **_OF_TEXTS),
            Head("ModernBertForTokenClassification", "ForTokenClassification", **_OF_TOKENS),
            Head("ModernBertForQuestionAnswering", "ForQuestionAnswering", **_OF_TOKENS),
            Head("ModernBertForMultipleChoice", "ForMultipleChoice", **_OF_TEXTS),
        ),
        components=COMPONENTS,
        per_layer=True,
        training_only=("initializer_cutoff_factor",),
        # the size of windows where no layer has one
        idle=lambda config: () if "sliding_attention" in config.layer_types else ("local_attention",),
        unread=(
            "hidden_activation",
            "rope_parameters",
            "cls_token_id",
            "sep_token_id",
            "deterministic_flash_attn",
            "sparse_pred_ignore_index",
        ),
    )
)
