# SPDX-License-Identifier: Apache-2.0
"""M2M-100 and NLLB-200's dense models: `m2m_100` <-> the free mix, an mBART with fairseq's sinusoids.

Those are tensor2tensor's: omega_i = 10000^(-i / (D / 2 - 1)), all sines first, and the first token stands at the
position after the padding token's id. Both sides count real tokens alone, transformers where ids differ from
`pad_token_id` and ours where `attention_mask` is 1. The language that generation starts with (`forced_bos_token_id`)
travels with the generation settings.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, register
from . import bart


def position(config: PreTrainedConfig) -> dict[str, Any]:
    """fairseq's sinusoids as ours, whose exponents are -2i / D.

    Raises:
        ValueError: their tables do not exist for this width, or without a padding token.
    """
    half = config.d_model // 2
    if half < 2 or config.d_model % 2:
        raise ValueError(f"Sinusoids of d_model={config.d_model!r} do not convert; it has to be even and at least 4.")
    if config.pad_token_id is None:
        raise ValueError("pad_token_id=None does not convert: positions start after the padding token's id.")
    return {
        "type": "sinusoidal_absolute",
        "layout": "half",
        "base": 10000.0 ** (half / (half - 1)),
        "offset": config.pad_token_id + 1,
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return bart.to_ours(
        config,
        embedding={"type": "token", "scale": bool(config.scale_embedding)},
        position=position(config),
        residual="pre_ln",
    )


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    fields = bart.towers_to_theirs(config)
    del fields["is_decoder"]
    return fields


CONVERTER = register(
    Converter(
        model_type="m2m_100",
        variant="xformer",
        native=False,
        components={"position": ("sinusoidal_absolute",), "residual": ("pre_ln",)},
        fields=bart.TOWER_FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={name: bart.GROUPS[name] for name in ("backbone", "projection")},
        heads=(
            Head("M2M100Model", "Model", "", ("backbone",), two_towers=True),
            Head(
                "M2M100ForConditionalGeneration", "ForSeq2SeqLM", "model.", ("backbone", "projection"), two_towers=True
            ),
        ),
        unread=("activation_function",),
        training_only=bart.LAYER_DROPS,
    )
)
