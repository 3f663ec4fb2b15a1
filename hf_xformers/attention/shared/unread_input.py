# SPDX-License-Identifier: Apache-2.0
"""Cross-attention that reads the memory alone, and nothing of its own input: which residuals have a use for it."""

from __future__ import annotations

from typing import Any


def check_unread_input(config: Any, what: str) -> None:
    """Refuses residuals that would have parameters without a gradient around a cross-attention that reads nothing of
    its own input: those that normalize that input, and those that keep nothing of the residual stream, so that
    whatever stands before the sublayer has no effect. what: who reads what, the beginning of the refusal.

    Raises:
        ValueError: the residual of `config` is one of them.
    """
    residual = config.residual
    if residual.enters_as_is and residual.module.keeps_stream:
        return
    useless = "would have a norm without use" if residual.module.keeps_stream else "would drop the text so far"
    raise ValueError(
        f"{what} and nothing of its own input, for which residual {residual.type!r} {useless}; take a residual that"
        " normalizes behind the sum, such as 'post_ln', or leave `cross_attention` at 'dense'."
    )


def reads_memory(spec: Any, config: Any) -> bool:
    """Whether `spec` is the cross-attention of this tower."""
    return config.cross_attention is spec and config.is_decoder and config.is_encoder_decoder
