"""XLNet as it encodes texts: `xlnet` <-> `xformer`, with Transformer-XL's attention and its segment term.

Every token sees every other (`attn_type="bi"`, without a permutation mask), and predictions are made where the tokens
stand. The second stream of pretraining, which predicts places that it does not see, has no counterpart, nor has the
memory of earlier segments: `mask_emb` is left behind. Its heads for whole texts read the last place of a row through a
hidden layer, and its large head for questions searches beams: the model under them converts.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, activation, feedforward, register
from ..rules import Operation, Rule, copied, only_ours, only_theirs

FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "hidden_dropout_prob": "dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}


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
    }


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


BASE = ("backbone", "second stream")

CONVERTER = register(
    Converter(
        model_type="xlnet",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "second stream": (only_theirs("@mask_emb"),),
            "lm": (copied("lm_loss.*", "lm_head.decoder.*"),),
            "token": (copied("classifier.*", "classifier.*"),),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
            "summary": (only_theirs("sequence_summary.summary.*", "logits_proj.*"), only_ours("classifier.*")),
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
            Head("XLNetForSequenceClassification", "ForSequenceClassification", "transformer.", (*BASE, "summary")),
            Head("XLNetForMultipleChoice", "Model", "transformer.", (*BASE, "summary")),
            Head("XLNetForQuestionAnswering", "Model", "transformer.", (*BASE, "beams")),
        ),
        unread=(
            "ff_activation",
            "same_length",  # of a mask that looks back alone
            *("mem_len", "reuse_len", "use_mems_eval", "use_mems_train"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
            *("start_n_top", "end_n_top"),
        ),
        unread_ours=("max_position_embeddings",),
        native=False,
        components={
            "embedding": ("token",),
            "position": ("none",),
            "attention": ("transformer_xl",),
            "residual": ("post_ln",),
            "normalization": ("layer_norm",),
            "block": ("vanilla",),
            "stack": ("plain",),
            "head": ("linear",),
        },
    )
)
