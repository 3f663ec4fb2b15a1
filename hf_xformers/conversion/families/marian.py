# SPDX-License-Identifier: Apache-2.0
"""Marian: `marian` <-> the free mix, a BART with sinusoids in place of learned positions and no norm after them.

What BART's text says holds here, too. transformers stores the sinusoids as tables that do not learn; ours computes
them, so tables with other numbers are refused. The towers of some checkpoints have a token table each
(`share_encoder_decoder_embeddings=False`), here `decoder_vocab_size`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, register
from ..rules import Rule, computed, sinusoids
from . import bart

POSITION = {"type": "sinusoidal_absolute", "layout": "half"}


def tables(config: XFormerConfig) -> tuple[Rule, ...]:
    """The tables of sinusoids, which only transformers has."""
    rows, width = config.max_position_embeddings, config.hidden_size
    return tuple(
        computed(f"@{name}.embed_positions.weight", lambda: sinusoids(rows, width, "half"), "sinusoids")
        for name in (("encoder", "decoder") if config.is_encoder_decoder else ("decoder",))
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    own = config.is_encoder_decoder and not getattr(config, "share_encoder_decoder_embeddings", True)
    return bart.to_ours(
        config,
        decoder_vocab_size=config.decoder_vocab_size if own else None,
        embedding={"type": "token", "scale": bool(config.scale_embedding)},
        position=POSITION,
        head={"type": "linear", "bias": True},
    )


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    fields = bart.towers_to_theirs(config)
    name = fields["activation_function"]
    published = {"silu": "swish"}  # their name for it in published checkpoints
    return {
        **fields,
        "activation_function": published.get(name, name),
        "share_encoder_decoder_embeddings": config.shares_token_table,
        "decoder_vocab_size": config.vocab_size if config.shares_token_table else config.decoder_vocab_size,
    }


CONVERTER = register(
    Converter(
        model_type="marian",
        variant="xformer",
        native=False,
        components={"position": ("sinusoidal_absolute",), "residual": ("post_ln",)},
        fields=bart.TOWER_FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**bart.GROUPS, "tables": tables},
        heads=bart.heads("Marian", generator="MTModel", classifiers=False, extra=("tables",)),
        unread_alone=bart.CONVERTER.unread_alone,
        unread=bart.CONVERTER.unread,
        training_only=bart.LAYER_DROPS,
    )
)
