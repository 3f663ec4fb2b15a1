# SPDX-License-Identifier: Apache-2.0
"""GPT-Neo: `gpt_neo` <-> a free mix of dense and banded layers (`xformer`).

Scores are not divided by anything. Without `position_ids`, transformers counts padding on the left as positions and
ours does not; with the position ids that `generate` makes, the two agree. Its `token_type_ids` are looked up in the
token table; ours are left out.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rules import copied
from .gpt2 import SEQUENCE

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": ("resid_dropout", "embed_dropout"),
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
# The tasks that every decoder of transformers does alike.
TASKS = {
    "sequence": SEQUENCE,
    "token": (copied("classifier.*", "classifier.*"),),
    "spans": (copied("qa_outputs.*", "classifier.*"),),
}

BACKBONE = (
    copied("@wte.weight", "@trunk.embedding.tokens.weight"),
    copied("@wpe.weight", "@trunk.position.table.weight"),
    copied("@h.{i}.ln_1.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    copied("@h.{i}.attn.attention.q_proj.weight", "@trunk.layers.{i}.attention.q_proj.weight"),
    copied("@h.{i}.attn.attention.k_proj.weight", "@trunk.layers.{i}.attention.k_proj.weight"),
    copied("@h.{i}.attn.attention.v_proj.weight", "@trunk.layers.{i}.attention.v_proj.weight"),
    copied("@h.{i}.attn.attention.out_proj.*", "@trunk.layers.{i}.attention.o_proj.*"),
    copied("@h.{i}.ln_2.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
    copied("@h.{i}.mlp.c_fc.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
    copied("@h.{i}.mlp.c_proj.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
    copied("@ln_f.*", "@trunk.final_norm.*"),
)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    settings = {"bias": False, "output_bias": True, "scale": 1.0}
    kinds: dict[str, dict[str, Any]] = {
        "global": {"type": "dense", **settings},
        "local": {"type": "band_attention", "window_size": config.window_size, **settings},
    }
    layers = config.attention_layers
    differing = {i: {"attention": kinds[kind]} for i, kind in enumerate(layers) if kind != layers[0]}
    return {
        "is_decoder": True,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "attention": kinds[layers[0]],
        "per_layer_config": differing or None,
        "residual": "pre_ln",
        "feedforward": feedforward(config.activation_function),
        "head": "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    specs = [config.layer(index).attention for index in range(config.num_hidden_layers)]
    local = [spec for spec in specs if spec.type == "band_attention"]
    kinds = ["local" if spec.type == "band_attention" else "global" for spec in specs]
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if count % n == 0 and kinds == kinds[:n] * (count // n))
    inner = config.intermediate_size
    return {
        "attention_types": [[kinds[:period], count // period]],
        "window_size": getattr(local[0], "window_size", 256) if local else 256,
        "intermediate_size": None if inner == 4 * config.hidden_size else inner,
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="gpt_neo",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={"backbone": BACKBONE, "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),), **TASKS},
        heads=decoder_heads("GPTNeo", "transformer."),
        # Layers are compared one by one, whichever way `attention_types` counts them; without a local one there is no
        # window. `intermediate_size` may repeat the default.
        unread=("attention_types", "window_size", "intermediate_size", "activation_function"),
        training_only=("embed_dropout",),
        native=False,
        components={
            "position": ("learned_absolute",),
            "attention": ("dense", "band_attention"),
            "residual": ("pre_ln",),
            "block": ("vanilla",),
        },
        per_layer=True,
    )
)
