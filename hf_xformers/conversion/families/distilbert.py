# SPDX-License-Identifier: Apache-2.0
"""DistilBERT: `distilbert` <-> the free mix.

Where a dense layer with ReLU stands before a classifier of texts or of choices, it is our pooler. With
`sinusoidal_pos_embds` transformers starts its position table as sinusoids and may train it; a table that no longer
holds them is refused, since the position here computes them: with `sinusoidal_pos_embds=False` in its config the
checkpoint converts, table and all.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, computed, copied, sinusoids
from .bert import CLASSIFIERS, COMPONENTS

FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "seq_classif_dropout",
    "initializer_range": "initializer_range",
}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-12,
        "embedding": {"type": "token", "normalize": True},
        "position": "sinusoidal_absolute" if config.sinusoidal_pos_embds else "learned_absolute",
        "feedforward": feedforward(config.activation),
        "head": {"type": "transform", "activation": activation_name(config.activation)},
        "pooler_activation": "relu",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    rate = config.classifier_dropout
    return {
        "activation": activation(config.feedforward)[0],
        "sinusoidal_pos_embds": config.position.type == "sinusoidal_absolute",
        "seq_classif_dropout": config.hidden_dropout_prob if rate is None else rate,
    }


def position_rule(theirs: str, config: XFormerConfig) -> Rule:
    """A position table [max_position_embeddings, hidden_size] that is learned, or sinusoids."""
    if config.position.type == "sinusoidal_absolute":
        return computed(theirs, lambda: sinusoids(config.max_position_embeddings, config.hidden_size), "sinusoids")
    return copied(theirs, "@trunk.position.table.weight")


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    layer, ours = "@transformer.layer.{i}", "@trunk.layers.{i}"
    return (
        copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        position_rule("@embeddings.position_embeddings.weight", config),
        copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
        copied(f"{layer}.attention.q_lin.*", f"{ours}.attention.q_proj.*"),
        copied(f"{layer}.attention.k_lin.*", f"{ours}.attention.k_proj.*"),
        copied(f"{layer}.attention.v_lin.*", f"{ours}.attention.v_proj.*"),
        copied(f"{layer}.attention.out_lin.*", f"{ours}.attention.o_proj.*"),
        copied(f"{layer}.sa_layer_norm.*", f"{ours}.attention_residual.norm.*"),
        copied(f"{layer}.ffn.lin1.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{layer}.ffn.lin2.*", f"{ours}.feedforward.down_proj.*"),
        copied(f"{layer}.output_layer_norm.*", f"{ours}.feedforward_residual.norm.*"),
    )


POOLED = {"add_pooler": True}

CONVERTER = register(
    Converter(
        model_type="distilbert",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            # the token table again, as a rule: present where the rest of the head is not
            "projection": (copied("vocab_projector.weight", "lm_head.decoder.weight"),),
            "mlm": (
                copied("vocab_transform.*", "lm_head.dense.*"),
                copied("vocab_layer_norm.*", "lm_head.norm.*"),
                copied("vocab_projector.bias", "lm_head.decoder.bias"),
            ),
            "text_pooler": (copied("pre_classifier.*", "@pooler.dense.*"),),
            **CLASSIFIERS,
        },
        heads=(
            Head("DistilBertModel", "Model", "", ("backbone",)),
            Head("DistilBertForMaskedLM", "ForMaskedLM", "distilbert.", ("backbone", "projection", "mlm")),
            Head(
                "DistilBertForSequenceClassification",
                "ForSequenceClassification",
                "distilbert.",
                ("backbone", "text_pooler", "sequence"),
                settings=POOLED,
            ),
            Head("DistilBertForTokenClassification", "ForTokenClassification", "distilbert.", ("backbone", "token")),
            Head("DistilBertForQuestionAnswering", "ForQuestionAnswering", "distilbert.", ("backbone", "spans")),
            Head(
                "DistilBertForMultipleChoice",
                "ForMultipleChoice",
                "distilbert.",
                ("backbone", "text_pooler", "choice"),
                settings=POOLED,
            ),
        ),
        unread=("activation",),
        training_only=("qa_dropout",),
        native=False,
        components=COMPONENTS | {"position": ("learned_absolute", "sinusoidal_absolute")},
    )
)
