# SPDX-License-Identifier: Apache-2.0
"""BLOOM: `bloom` <-> a free mix with ALiBi (`xformer`).

transformers adds slope * (place of the key), ours -slope * (distance): the same softmax. It has no dropout after the
embedding, ours has it with the same rate as elsewhere.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rules import Rule, copied, fused_by_head
from .gpt_neo import TASKS

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
LENGTH = 2048  # of the texts that BLOOM was trained on; its positions have no limit


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    theirs, ours = "@h.{i}", "@trunk.layers.{i}"
    return (
        copied("@word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        copied("@word_embeddings_layernorm.*", "@trunk.embedding.norm.*"),
        copied(f"{theirs}.input_layernorm.*", f"{ours}.attention_residual.norm.*"),
        fused_by_head(
            f"{theirs}.self_attention.query_key_value.*",
            *(f"{ours}.attention.{name}_proj.*" for name in "qkv"),
            groups=config.num_attention_heads,
        ),
        copied(f"{theirs}.self_attention.dense.*", f"{ours}.attention.o_proj.*"),
        copied(f"{theirs}.post_attention_layernorm.*", f"{ours}.feedforward_residual.norm.*"),
        copied(f"{theirs}.mlp.dense_h_to_4h.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{theirs}.mlp.dense_4h_to_h.*", f"{ours}.feedforward.down_proj.*"),
        copied("@ln_f.*", "@trunk.final_norm.*"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise ValueError(
            f"slow_but_exact=True with pretraining_tp={config.pretraining_tp} does not convert: transformers' divided"
            " sums leave two biases of each layer out; set slow_but_exact to False in its config.json."
        )
    return {
        "is_decoder": True,
        "intermediate_size": 4 * config.hidden_size,
        "max_position_embeddings": LENGTH,
        "embedding": {"type": "token", "normalize": True},
        "position": "alibi",
        "residual": "pre_ln",
        "feedforward": feedforward("gelu_new"),
        "head": "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {}


CONVERTER = register(
    Converter(
        model_type="bloom",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={"backbone": _backbone, "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),), **TASKS},
        heads=decoder_heads("Bloom", "transformer."),
        # how a sum is divided in their implementation, if it is
        unread=("pretraining_tp", "slow_but_exact"),
        unread_ours=("max_position_embeddings",),
        native=False,
        components={
            "position": ("alibi",),
            "attention": ("dense",),
            "residual": ("pre_ln",),
            "block": ("vanilla",),
        },
    )
)
