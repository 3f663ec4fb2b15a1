# SPDX-License-Identifier: Apache-2.0
"""XLNet: `xlnet` <-> `xf_xlnet`, with Transformer-XL's attention, its segment term, and both streams.

`perm_mask` and `target_mapping` mean the same on both sides, but for a target that sees no token at all: in
transformers it reads the mean of all tokens, here nothing. The memory of earlier segments has no counterpart. Its
heads for whole texts read the last slot of a row through a hidden layer, ours the last token, which is the same where
padding stands in front, as XLNet's tokenizer has it. Its large head for questions searches beams: the model under it
converts.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied, only_theirs

FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "hidden_dropout_prob": "dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}


def _pooling(config: PreTrainedConfig) -> str:
    if config.summary_type not in ("first", "last"):
        raise ValueError(
            f"summary_type={config.summary_type!r} has no counterpart: texts are read at their 'first' or 'last' token"
            " here, as means of ours leave padding out."
        )
    return config.summary_type


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "attention_probs_dropout_prob": config.dropout,
        "activation_dropout_prob": config.dropout,
        "position": "none",
        "attention": {
            "type": "transformer_xl",
            "bias": False,
            "share_biases": False,
            "segments": True,
            "clamp": config.clamp_len if config.clamp_len > 0 else None,
        },
        "feedforward": feedforward(config.ff_activation),
        "head": {"type": "linear", "bias": True},
        "classifier_pooling": _pooling(config),
        "classifier_activation": config.summary_activation or "tanh",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    if config.head_width * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"head_dim={config.head_dim!r} has no counterpart in transformers: the heads of an 'xlnet' model share"
            f" `hidden_size` ({config.hidden_size}) among them."
        )
    clamp = getattr(config.attention, "clamp", None)
    return {
        "d_head": config.head_width,
        "ff_activation": activation(config.feedforward)[0],
        "clamp_len": -1 if clamp is None else clamp,
        "summary_type": "first" if config.classifier_pooling == "first" else "last",
        "summary_activation": config.classifier_activation,
    }


START = Operation("flattened", lambda t: [t[0].flatten()], lambda t: [t[0][None, None]], plain=True)
# theirs: [same, different]
SEGMENTS = Operation("in the other order", lambda t: [t[0].flip(0)], lambda t: [t[0].flip(0)], plain=True)


def _layers(config: XFormerConfig) -> tuple[Rule, ...]:
    """Their projections are [D, H, d]: of the input, and transposed of the output."""
    heads = config.num_attention_heads
    inward = Operation(
        "laid out by heads",
        lambda t: [t[0].flatten(1).t().contiguous()],
        lambda t: [t[0].t().unflatten(1, (heads, -1)).contiguous()],
        plain=True,
    )
    outward = Operation(
        "laid out by heads", lambda t: [t[0].flatten(1)], lambda t: [t[0].unflatten(1, (heads, -1))], plain=True
    )
    theirs, ours = "@layer.{i}.rel_attn", "@trunk.layers.{i}.attention"
    return (
        *(Rule((f"{theirs}.{name}",), (f"{ours}.{name}_proj.weight",), inward) for name in "qkvr"),
        Rule((f"{theirs}.o",), (f"{ours}.o_proj.weight",), outward),
        copied(f"{theirs}.r_w_bias", f"{ours}.content_bias"),
        copied(f"{theirs}.r_r_bias", f"{ours}.position_bias"),
        copied(f"{theirs}.r_s_bias", f"{ours}.segment_bias"),
        Rule((f"{theirs}.seg_embed",), (f"{ours}.segment_table",), SEGMENTS),
        copied(f"{theirs}.layer_norm.*", "@trunk.layers.{i}.attention_residual.norm.*"),
        copied("@layer.{i}.ff.layer_1.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
        copied("@layer.{i}.ff.layer_2.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
        copied("@layer.{i}.ff.layer_norm.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
    )


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (copied("@word_embedding.weight", "@trunk.embedding.tokens.weight"), *_layers(config))


def _other_pooling(config: XFormerConfig) -> str | None:
    if config.classifier_pooling in ("first", "last"):
        return None
    return f"it reads the first or the last token, and classifier_pooling={config.classifier_pooling!r} does not"


BASE = ("backbone", "second stream")
SUMMARY = {"classifier_transform": "dense"}

CONVERTER = register(
    Converter(
        model_type="xlnet",
        variant="xf_xlnet",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "second stream": (Rule(("@mask_emb",), ("@trunk.stack.start",), START),),
            "lm": (copied("lm_loss.*", "lm_head.decoder.*"),),
            "token": (copied("classifier.*", "classifier.*"),),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
            "summary": (
                copied("sequence_summary.summary.*", "transform.dense.*"),
                copied("logits_proj.*", "classifier.*"),
            ),
            "beams": (
                only_theirs("start_logits.dense.*", "end_logits.dense_0.*", "end_logits.dense_1.*"),
                only_theirs("end_logits.LayerNorm.*", "answer_class.dense_0.*"),
                only_theirs("answer_class.dense_1.weight"),
            ),
        },
        heads=(
            Head("XLNetModel", "Model", "", BASE),
            Head("XLNetLMHeadModel", "ForMaskedLM", "transformer.", (*BASE, "lm")),
            Head("XLNetForTokenClassification", "ForTokenClassification", "transformer.", (*BASE, "token")),
            Head("XLNetForQuestionAnsweringSimple", "ForQuestionAnswering", "transformer.", (*BASE, "spans")),
            Head(
                "XLNetForSequenceClassification",
                "ForSequenceClassification",
                "transformer.",
                (*BASE, "summary"),
                settings=SUMMARY,
                refuses=_other_pooling,
            ),
            Head(
                "XLNetForMultipleChoice",
                "ForMultipleChoice",
                "transformer.",
                (*BASE, "summary"),
                settings=SUMMARY,
                refuses=_other_pooling,
            ),
            Head("XLNetForQuestionAnswering", "Model", "transformer.", (*BASE, "beams")),
        ),
        unread=(
            "ff_activation",
            "same_length",  # of a mask that looks back alone
            *("mem_len", "reuse_len", "use_mems_eval", "use_mems_train"),
            "summary_last_dropout",
            *("start_n_top", "end_n_top"),
        ),
        unread_ours=("max_position_embeddings",),
    )
)
