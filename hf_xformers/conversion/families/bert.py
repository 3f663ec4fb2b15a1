# SPDX-License-Identifier: Apache-2.0
"""BERT: `bert` <-> `xf_bert`.

A checkpoint with `position_embedding_type` `relative_key` or `relative_key_query` becomes an `xf_bert` with the
position `shaw_relative`, whose tables are read from the files: transformers 5 computes such a model as if it had
absolute positions and leaves the tables behind. There is no way back, since it has no class for them any more.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied, first, only_theirs

FIELDS = {
    name: name
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "initializer_range",
        "layer_norm_eps",
        "is_decoder",
    )
}

LAYERS = (
    copied("@encoder.layer.{i}.attention.self.query.*", "@trunk.layers.{i}.attention.q_proj.*"),
    copied("@encoder.layer.{i}.attention.self.key.*", "@trunk.layers.{i}.attention.k_proj.*"),
    copied("@encoder.layer.{i}.attention.self.value.*", "@trunk.layers.{i}.attention.v_proj.*"),
    copied("@encoder.layer.{i}.attention.output.dense.*", "@trunk.layers.{i}.attention.o_proj.*"),
    copied("@encoder.layer.{i}.attention.output.LayerNorm.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    copied("@encoder.layer.{i}.intermediate.dense.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
    copied("@encoder.layer.{i}.output.dense.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
    copied("@encoder.layer.{i}.output.LayerNorm.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
)
EMBEDDINGS = (
    copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
    copied("@embeddings.token_type_embeddings.weight", "@trunk.embedding.types.weight"),
    copied("@embeddings.position_embeddings.weight", "@trunk.position.table.weight"),
    copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
)
BACKBONE = (*EMBEDDINGS, *LAYERS)
# What a free mix has to have to be one of BERT's relatives.
COMPONENTS: dict[str, tuple[str, ...]] = {
    "embedding": ("token",),
    "position": ("learned_absolute",),
    "attention": ("dense",),
    "normalization": ("layer_norm",),
    "residual": ("post_ln",),
    "feedforward": ("relu", "gelu", "swish", "squared_relu"),
    "block": ("vanilla",),
    "stack": ("plain",),
    "head": ("transform",),
}
POOLER = (copied("@pooler.dense.*", "@pooler.dense.*"),)
_CLASSIFIER = (copied("classifier.*", "classifier.*"),)
CLASSIFIERS = {
    **dict.fromkeys(("sequence", "token", "choice"), _CLASSIFIER),
    "spans": (copied("qa_outputs.*", "classifier.*"),),
}
# Where a dense layer with an activation stands before the classifier of texts, it is our pooler.
DENSE_CLASSIFIERS = {
    **CLASSIFIERS,
    "sequence_pooler": (copied("classifier.dense.*", "@pooler.dense.*"),),
    "sequence": (copied("classifier.out_proj.*", "classifier.*"),),
}


def language_head(head: str, dense: str, norm: str) -> dict[str, tuple[Rule, ...]]:
    """The rules of a head that predicts tokens: `projection` (the token table again, as a rule, and present where the
    rest of the head is not) and `mlm`. The projection has its bias under two names, of which the second is the one of
    older releases, and reads the first alone."""
    return {
        "projection": (copied(f"{head}.decoder.weight", "lm_head.decoder.weight"),),
        "mlm": (
            copied(f"{head}.{dense}.*", "lm_head.dense.*"),
            copied(f"{head}.{norm}.*", "lm_head.norm.*"),
            first((f"{head}.decoder.bias", f"{head}.bias"), "lm_head.decoder.bias"),
        ),
    }


LANGUAGE_HEAD = language_head("cls.predictions", "transform.dense", "transform.LayerNorm")


def refuse_relative_positions(config: PreTrainedConfig) -> None:
    """Old configs may ask for relative positions, which transformers 5 reads no more."""
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ValueError(f"position_embedding_type={kind!r} does not convert; only absolute positions do.")


def position(config: PreTrainedConfig) -> dict[str, Any]:
    """Our position for their `position_embedding_type`.

    Raises:
        ValueError: there is none.
    """
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind == "absolute":
        return {"type": "learned_absolute"}
    if kind not in ("relative_key", "relative_key_query"):
        raise ValueError(
            f"position_embedding_type={kind!r} does not convert; 'absolute', 'relative_key' and 'relative_key_query'"
            " do."
        )
    return {
        "type": "shaw_relative",
        "max_distance": config.max_position_embeddings - 1,
        "values": False,
        "keys": kind == "relative_key_query",
    }


# Their rows lead from the most distant later key to the most distant earlier one, ours the other way.
_REVERSED = Operation(
    "rows from the other end", lambda t: [t[0].flip(0).unsqueeze(0)], lambda t: [t[0].squeeze(0).flip(0)]
)


_ABSOLUTE = "@embeddings.position_embeddings.weight"


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    """The rules of a BERT with absolute or relative positions."""
    if config.position.type != "shaw_relative":
        return BACKBONE
    table = Rule(
        ("@encoder.layer.{i}.attention.self.distance_embedding.weight",),
        ("@trunk.layers.{i}.attention.position_terms.key_table",),
        _REVERSED,
    )
    return (*(rule for rule in BACKBONE if rule.theirs != (_ABSOLUTE,)), table)


def _idle_positions(config: XFormerConfig) -> tuple[Rule, ...]:
    """The table of absolute positions that a model with relative ones has, and does not read."""
    return (only_theirs(_ABSOLUTE),) if config.position.type == "shaw_relative" else ()


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "position": position(config),
        "add_pooler": True,
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {"hidden_act": activation(config.feedforward)[0]}


CONVERTER = register(
    Converter(
        model_type="bert",
        variant="xf_bert",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": backbone,
            "idle_positions": _idle_positions,
            "pooler": POOLER,
            **LANGUAGE_HEAD,
            "pair": (copied("cls.seq_relationship.*", "classifier.*"),),
            **CLASSIFIERS,
        },
        heads=(
            Head("BertModel", "Model", "", ("backbone", "pooler")),
            Head(
                "BertForPreTraining",
                "ForPreTraining",
                "bert.",
                ("backbone", "pooler", "projection", "mlm", "pair"),
                causal=False,
            ),
            Head("BertForMaskedLM", "ForMaskedLM", "bert.", ("backbone", "projection", "mlm"), causal=False),
            Head("BertLMHeadModel", "ForCausalLM", "bert.", ("backbone", "projection", "mlm"), causal=True),
            Head(
                "BertForNextSentencePrediction",
                "ForNextSentencePrediction",
                "bert.",
                ("backbone", "pooler", "pair"),
                causal=False,
            ),
            Head(
                "BertForSequenceClassification",
                "ForSequenceClassification",
                "bert.",
                ("backbone", "pooler", "sequence"),
            ),
            Head("BertForTokenClassification", "ForTokenClassification", "bert.", ("backbone", "token")),
            Head("BertForQuestionAnswering", "ForQuestionAnswering", "bert.", ("backbone", "spans")),
            Head("BertForMultipleChoice", "ForMultipleChoice", "bert.", ("backbone", "pooler", "choice")),
        ),
        unread=("hidden_act",),
    )
)
