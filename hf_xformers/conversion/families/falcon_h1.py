# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: `falcon_h1` -> `xformer`. Attention and Mamba-2 side by side in every layer, with factors on what they
read and give, on token vectors, keys, networks and logits.

What `mamba2.py` says of time steps and of biases next to padding on the left holds here, too.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama
from .mamba2 import bounds_of_steps, mixer_rules, step_limit

NORMS = {"input_layernorm": "attention_residual", "pre_ff_layernorm": "feedforward_residual"}
# Ours and theirs of the mixer.
FIELDS_OF_MIXER = {
    **{"key_heads": "mamba_n_groups", "value_heads": "mamba_n_heads", "key_width": "mamba_d_state"},
    **{"value_width": "mamba_d_head", "conv": "mamba_d_conv", "bias": "mamba_proj_bias"},
    **{"output_bias": "projectors_bias", "chunk_size": "mamba_chunk_size"},
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours, bias = "@layers.{i}", "@trunk.layers.{i}", config.feedforward.bias
    return (
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        *(copied(f"{own}.{theirs}.weight", f"{ours}.{mine}.norm.weight") for theirs, mine in NORMS.items()),
        *llama.attention_rules(config),
        *mixer_rules(f"{own}.mamba", f"{ours}.mixer", config.block.mixer, config),
        *(
            llama.linear(f"{own}.feed_forward.{x}_proj", f"{ours}.feedforward.{x}_proj", bias)
            for x in ("gate", "up", "down")
        ),
        copied("@final_layernorm.weight", "@trunk.final_norm.weight"),
    )


def factors(config: PreTrainedConfig, *names: str) -> tuple[float, ...]:
    return tuple(llama.factor_of(config, name) for name in names)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    """Our fields.

    Raises:
        ValueError: another activation than SiLU, a convolution without biases, bounds of time steps that are none, or
            a factor that is not positive.
    """
    llama.refuse_other(config, hidden_act="silu", mamba_conv_bias=True)
    width, (of_keys,), (gate, down) = (
        llama.own_width(config),
        factors(config, "key_multiplier"),
        config.mlp_multipliers,
    )
    norm = "none" if not config.mamba_rms_norm else ("norm_first" if config.mamba_norm_before_gate else "gate_first")
    mixer = {
        **{"type": "mamba2", "gate_norm": norm, "part_scales": list(config.ssm_multipliers)},
        **bounds_of_steps(config),
        **{mine: getattr(config, theirs) for mine, theirs in FIELDS_OF_MIXER.items()},
    }
    return {
        **llama.DECODER,
        "head_dim": width,
        "embedding": {"type": "token", "scale": llama.factor_of(config, "embedding_multiplier"), "scale_given": False},
        "head": {"type": "linear", "scale": llama.factor_of(config, "lm_head_multiplier")},
        "attention": {
            **{"type": "dense", "bias": config.attention_bias},
            "scale": None if of_keys == 1.0 else of_keys * width**-0.5,
        },
        "block": {
            **{"type": "hybrid_heads", "mixer": mixer, "feedforward_factor": down},
            "attention_factors": factors(config, "attention_in_multiplier", "attention_out_multiplier"),
            "mixer_factors": factors(config, "ssm_in_multiplier", "ssm_out_multiplier"),
        },
        "feedforward": {**feedforward(config.hidden_act, gated=True, bias=config.mlp_bias), "gate_scale": gate},
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    block, scale, of_keys = config.block, config.embedding.scale, config.attention.scale
    mixer = block.mixer
    return {
        **llama.width_beside(config),
        **{theirs: getattr(mixer, mine) for mine, theirs in FIELDS_OF_MIXER.items()},
        "projectors_bias": mixer.has_output_bias,
        "mamba_d_ssm": mixer.value_heads * mixer.value_width,
        "mamba_rms_norm": mixer.gate_norm != "none",
        "mamba_norm_before_gate": mixer.gate_norm != "gate_first",
        "time_step_limit": step_limit(mixer),
        "ssm_multipliers": [1.0] * 5 if mixer.part_scales is None else list(mixer.part_scales),
        "num_key_value_heads": config.key_value_heads,
        "attention_bias": config.attention.bias,
        "mlp_bias": config.feedforward.bias,
        "embedding_multiplier": config.hidden_size**0.5 if scale is True else float(scale or 1.0),
        "lm_head_multiplier": config.logit_scale,
        "key_multiplier": 1.0 if of_keys is None else float(f"{of_keys * config.head_width**0.5:.12g}"),
        **dict(zip(("attention_in_multiplier", "attention_out_multiplier"), block.attention_factors)),
        **dict(zip(("ssm_in_multiplier", "ssm_out_multiplier"), block.mixer_factors)),
        "mlp_multipliers": [getattr(config.feedforward, "gate_scale", 1.0), block.feedforward_factor],
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="falcon_h1",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("FalconH1", sequence=False, token=False, spans=None),
        components={**llama.COMPONENTS, "block": ("hybrid_heads",), "feedforward": ("swiglu",)},
        # what heads of the mixer come to together, and which logits `generate` asks for
        unread=("rope_parameters", "mamba_d_ssm", "mamba_expand", "num_logits_to_keep"),
        idle=lambda config: () if config.mamba_rms_norm else ("mamba_norm_before_gate",),
    )
)
