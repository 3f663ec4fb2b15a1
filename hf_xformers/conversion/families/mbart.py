# SPDX-License-Identifier: Apache-2.0
"""mBART: `mbart` <-> the free mix, a BART that normalizes before its sublayers and after its towers.

What BART's text says holds here, too. Without `decoder_input_ids` transformers starts the decoder with the last token
of the labels, the target's language; ours starts with `decoder_start_token_id` for every text, so give
`decoder_input_ids` with `labels` while you train. The language that generation starts with (`forced_bos_token_id`,
`decoder_start_token_id`) travels with the generation settings.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, register
from . import bart


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return bart.to_ours(
        config,
        position={"type": "learned_absolute", "offset": 2},
        residual="pre_ln",
        head={"type": "linear", "bias": True},
    )


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    # None is what their config says where the language decides; ours has the padding token there
    start = config.decoder_start_token_id
    return {**bart.to_theirs(config), "decoder_start_token_id": None if start == config.pad_token_id else start}


CONVERTER = register(
    Converter(
        model_type="mbart",
        variant="xformer",
        native=False,
        components={"position": ("learned_absolute",), "residual": ("pre_ln",)},
        fields=bart.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=bart.GROUPS,
        # The decoder of its classifiers reads a text from the code of the language on that stands at its end.
        heads=tuple(head for head in bart.heads("MBart") if head.ours != "ForSequenceClassification"),
        unread_alone=bart.CONVERTER.unread_alone,
        unread=(*bart.CONVERTER.unread, "decoder_start_token_id"),
        training_only=bart.LAYER_DROPS,
    )
)
