"""LongT5 with local attention: `longt5` <-> the free mix, a T5 whose encoder reads a band of tokens.

Transient global attention (`encoder_attention_type="transient-global"`) does not convert: its summaries of blocks have
no component here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Head, register
from ..rules import Rule
from . import t5, umt5


def _encoder(config: XFormerConfig) -> tuple[Rule, ...]:
    def local(name: str) -> str:
        return name.replace(".SelfAttention.", ".LocalSelfAttention.")

    rules = t5.encoder(config)
    return tuple(dataclasses.replace(rule, theirs=tuple(map(local, rule.theirs))) for rule in rules)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **t5.to_ours(config),
        **{name: value for name, value in umt5.COMPONENTS.items() if name != "head"},
        "attention": {**umt5.DENSE, "type": "band_attention", "window_size": config.local_radius},
        "decoder": {"attention": umt5.DENSE} if config.is_encoder_decoder else None,
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    width = getattr(config.attention, "window_size", 127)
    if not isinstance(width, int):
        raise ValueError(f"window_size={width!r} has no counterpart: all layers of a 'longt5' model have one radius.")
    fields = t5.to_theirs(config)
    del fields["classifier_dropout"]
    return {**fields, "local_radius": width, "encoder_attention_type": "local"}


CONVERTER = register(
    dataclasses.replace(
        t5.CONVERTER,
        model_type="longt5",
        variant="xformer",
        native=False,
        components={
            "position": ("t5_relative_bias",),
            "residual": ("pre_ln",),
            "attention": ("band_attention", "dense"),
        },
        fields={name: theirs for name, theirs in t5.FIELDS.items() if name != "classifier_dropout"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={name: t5.CONVERTER.groups[name] for name in ("decoder", "lm")} | {"encoder": _encoder},
        heads=(
            Head("LongT5Model", "Model", "", t5.BOTH, two_towers=True),
            Head("LongT5ForConditionalGeneration", "ForSeq2SeqLM", "", (*t5.BOTH, "lm"), two_towers=True),
            # its config goes on speaking of two towers
            Head("LongT5EncoderModel", "Model", "", ("encoder",), two_towers=False, settings=umt5.ONE_TOWER),
        ),
        # blocks of the other kind of attention, too
        unread=(*t5.CONVERTER.unread, "global_block_size"),
    )
)
