# SPDX-License-Identifier: Apache-2.0
"""OPT: `opt` <-> a free mix with norms before sublayers or, for the 350 million one, after them (`xformer`).

Where the token table is narrower than the model (`word_embed_proj_dim`), transformers leads every state back to the
table's width and ours does it in the language model's head: a bare model then leaves that projection behind, and
classifiers, which read the narrow states, do not convert. It has no dropout after the embedding or before a
classifier, ours has it with the same rate as elsewhere.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied
from .gpt_neo import TASKS

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
}


def _is_narrow(config: XFormerConfig) -> bool:
    return config.embedding.type == "factorized"


def _reads_narrow_states(config: XFormerConfig) -> str | None:
    if not _is_narrow(config):
        return None
    width = config.embedding.table_width(config)
    return (
        f"with word_embed_proj_dim={width} below hidden_size={config.hidden_size} it reads states that were led back"
        f" to {width} numbers, and ours those of {config.hidden_size}"
    )


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    theirs, ours = "@decoder.layers.{i}", "@trunk.layers.{i}"
    suffix = "*" if config.attention.bias else "weight"
    linear = {f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkv"} | {
        "self_attn.out_proj": "attention.o_proj",
        "fc1": "feedforward.up_proj",
        "fc2": "feedforward.down_proj",
    }
    norms = {"self_attn_layer_norm": "attention_residual.norm", "final_layer_norm": "feedforward_residual.norm"}
    affine = tuple(copied(f"{theirs}.{a}.*", f"{ours}.{b}.*") for a, b in norms.items())
    final = (copied("@decoder.final_layer_norm.*", "@trunk.final_norm.*"),)
    narrow = (copied("@decoder.project_in.weight", "@trunk.embedding.proj.weight"),)
    return (
        copied("@decoder.embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        copied("@decoder.embed_positions.weight", "@trunk.position.table.weight"),
        *(narrow if _is_narrow(config) else ()),
        *(copied(f"{theirs}.{a}.{suffix}", f"{ours}.{b}.{suffix}") for a, b in linear.items()),
        *(affine if config.normalization.gain else ()),
        *(final if config.normalization.gain and config.residual.final_norm else ()),
    )


def _language_model(config: XFormerConfig) -> tuple[Rule, ...]:
    narrow = (copied("@decoder.project_out.weight", "lm_head.dense.weight"),)
    return (copied("lm_head.weight", "lm_head.decoder.weight"), *(narrow if _is_narrow(config) else ()))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    width = config.word_embed_proj_dim
    narrow = width != config.hidden_size
    before, affine = config.do_layer_norm_before, config.layer_norm_elementwise_affine
    final = before and not config._remove_final_layer_norm
    return {
        "is_decoder": True,
        "embedding": {"type": "factorized", "width": width, "normalize": False, "bias": False} if narrow else "token",
        "position": {"type": "learned_absolute", "offset": 2},
        "attention": {"type": "dense", "bias": config.enable_bias},
        "normalization": {"type": "layer_norm", "gain": affine, "bias": affine},
        "residual": {"type": "pre_ln" if before else "post_ln", "final_norm": final},
        "feedforward": feedforward(config.activation_function, bias=config.enable_bias),
        "head": "factorized" if narrow else "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    before = config.residual.type == "pre_ln"
    return {
        "word_embed_proj_dim": config.embedding.table_width(config),
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.residual.final_norm,
        "enable_bias": config.attention.bias,
        "layer_norm_elementwise_affine": config.normalization.gain,
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="opt",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "lm": _language_model,
            "sequence": TASKS["sequence"],
            "spans": TASKS["spans"],
        },
        heads=(
            Head("OPTModel", "Model", "", ("backbone",)),
            Head("OPTForCausalLM", "ForCausalLM", "model.", ("backbone", "lm")),
            Head(
                "OPTForSequenceClassification",
                "ForSequenceClassification",
                "model.",
                ("backbone", "sequence"),
                pooling="last",
                refuses=_reads_narrow_states,
            ),
            Head(
                "OPTForQuestionAnswering",
                "ForQuestionAnswering",
                "model.",
                ("backbone", "spans"),
                refuses=_reads_narrow_states,
            ),
        ),
        unread=("activation_function",),
        training_only=("layerdrop",),
        native=False,
        components={
            "embedding": ("token", "factorized"),
            "position": ("learned_absolute",),
            "attention": ("dense",),
            "normalization": ("layer_norm",),
            "residual": ("pre_ln", "post_ln"),
            "block": ("vanilla",),
        },
    )
)
