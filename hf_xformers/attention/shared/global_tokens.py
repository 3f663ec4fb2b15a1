# SPDX-License-Identifier: Apache-2.0
"""Tokens that a caller makes global: they see and are seen by all."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.call import Call
from ...core.prepared import Prepared
from ...core.text_parts import whole_rows


class GlobalTokens(Prepared):
    """Which tokens [B or 1, T] are global (None: none), and the largest number of them in a row (None: not known). Of
    [`given_globals`] those of whole texts, too, where each process holds a part."""

    chosen: Tensor | None
    most: int | None
    of_texts: Tensor | None = None


def given_globals(context: Call, most: int | None) -> tuple[Tensor | None, int | None]:
    """The model input `global_attention_mask` [B, T] as a boolean mask of real tokens, and the largest number of them
    in a row: the input `max_global_tokens` or `most`, where they bound it, else counted once per call. A graph that is
    being recorded cannot count, and makes room for all tokens. (None, 0) where there are none.

    Raises:
        ValueError: the mask is not [B, T], stands in a decoder, or has more tokens than `most`.
    """
    given = context.inputs.get("global_attention_mask")
    if given is None:
        return None, 0
    found = context.prepare(GlobalTokens, lambda: _chosen(given, context, most))
    return found.chosen, found.most


def _chosen(given: Tensor, context: Call, most: int | None) -> GlobalTokens:
    length = context.query_index.shape[0]
    if context.causal:
        raise ValueError(
            "`global_attention_mask` was given to a causal decoder, whose tokens cannot read later ones; leave it out."
        )
    if given.ndim != 2 or given.shape[1] != length:
        raise ValueError(
            f"`global_attention_mask` must be [batch, length] with length {length}, got {list(given.shape)}."
        )
    chosen = given.to(context.query_index.device) > 0
    if context.padding_mask is not None:
        chosen = chosen & context.padding_mask
    most, found = context.inputs.get("max_global_tokens", most), chosen
    if context.parts is not None:  # those of whole rows, wherever they stand
        found = whole_rows(chosen.to(torch.uint8), context.parts.group).bool()
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        most = length if most is None else most
    else:
        count = int(found.sum(-1).max()) if found.numel() else 0
        if most is not None and count > most:
            raise ValueError(
                f"A row of `global_attention_mask` has {count} tokens, more than `max_global_tokens` {most}; raise"
                " that."
            )
        most = count
    return GlobalTokens(None, 0, found) if most == 0 else GlobalTokens(chosen, most, found)
