# SPDX-License-Identifier: Apache-2.0
"""GPT-2: `gpt2` <-> `xf_gpt2`.

Without `position_ids`, transformers counts padding on the left as positions and ours does not; with the position ids
that `generate` makes, the two agree.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import copied, fused, only_theirs, transposed, zero

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_dropout_prob": ("resid_pdrop", "embd_pdrop"),
    "attention_probs_dropout_prob": "attn_pdrop",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
# Read by the double-heads class alone, whose second head has no counterpart.
SUMMARY = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)

BLOCKS = (
    copied("@h.{i}.ln_1.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    fused(
        "@h.{i}.attn.c_attn.*",
        "@trunk.layers.{i}.attention.q_proj.*",
        "@trunk.layers.{i}.attention.k_proj.*",
        "@trunk.layers.{i}.attention.v_proj.*",
    ),
    transposed("@h.{i}.attn.c_proj.*", "@trunk.layers.{i}.attention.o_proj.*"),
    copied("@h.{i}.ln_2.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
    transposed("@h.{i}.mlp.c_fc.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
    transposed("@h.{i}.mlp.c_proj.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
)
LANGUAGE_MODEL = (copied("lm_head.weight", "lm_head.decoder.weight"),)
# Read at the last real token, with no bias there.
SEQUENCE = (copied("score.weight", "classifier.weight"), zero("classifier.bias"))
SUMMARY_HEAD = (only_theirs("multiple_choice_head.summary.*"),)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    scale = None if config.scale_attn_weights else 1.0
    return {
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "attention": {"type": "dense", "scale": scale},
        "feedforward": feedforward(config.activation_function),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    inner = config.intermediate_size
    return {
        "n_inner": None if inner == 4 * config.hidden_size else inner,
        "scale_attn_weights": getattr(config.attention, "scale", None) is None,
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="gpt2",
        variant="xf_gpt2",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": (
                copied("@wte.weight", "@trunk.embedding.tokens.weight"),
                copied("@wpe.weight", "@trunk.position.table.weight"),
                *BLOCKS,
                copied("@ln_f.*", "@trunk.final_norm.*"),
            ),
            "lm": LANGUAGE_MODEL,
            "summary": SUMMARY_HEAD,
            "sequence": SEQUENCE,
            "token": (copied("classifier.*", "classifier.*"),),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
        },
        heads=(
            Head("GPT2Model", "Model", "", ("backbone",)),
            Head("GPT2LMHeadModel", "ForCausalLM", "transformer.", ("backbone", "lm")),
            Head("GPT2DoubleHeadsModel", "ForCausalLM", "transformer.", ("backbone", "lm", "summary")),
            Head(
                "GPT2ForSequenceClassification",
                "ForSequenceClassification",
                "transformer.",
                ("backbone", "sequence"),
                pooling="last",
            ),
            Head("GPT2ForTokenClassification", "ForTokenClassification", "transformer.", ("backbone", "token")),
            Head("GPT2ForQuestionAnswering", "ForQuestionAnswering", "transformer.", ("backbone", "spans")),
        ),
        # `n_inner` may repeat the default; its value is checked as `intermediate_size`
        unread=(*SUMMARY, "n_inner", "activation_function"),
        training_only=("embd_pdrop",),
    )
)
