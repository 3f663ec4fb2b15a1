# SPDX-License-Identifier: Apache-2.0
"""Predictions over a large vocabulary without the logits of all tokens: the head reads a few tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..modeling.language import XFormerForCausalLM, XFormerForMaskedLM
from .evaluation import IGNORE_INDEX, token_statistics

# Logits at a time (32 MB in float32), and the number from which on they are worth it.
NUMBERS_AT_ONCE = 1 << 23


def leaves_head_out(model: Any) -> bool:
    """Whether a model is one of this package's whose head looks at single tokens and makes nothing but logits."""
    plain, forward = (XFormerForMaskedLM.forward, XFormerForCausalLM.forward), getattr(type(model), "forward", None)
    named = getattr(forward, "__wrapped__", None)  # by a family, with the inputs that its components read
    return (forward in plain or named in plain) and not has_further_losses(model)


def has_further_losses(model: Any) -> bool:
    """Whether a model learns from labels by more than its last logits: those of exits, or of further tokens."""
    own = getattr(model, "further_losses", None)  # of the model itself, also where peft has wrapped it
    further = own is not None and own.__func__ is not XFormerForCausalLM.further_losses
    return further or getattr(model, "exits", None) is not None


def reads_in_pieces(model: Any, tokens: int) -> bool:
    """Whether the logits of so many tokens are too many to be made at once, and need not be."""
    return leaves_head_out(model) and tokens * model.config.vocab_size > NUMBERS_AT_ONCE


@contextlib.contextmanager
def head_left_out(model: Any) -> Iterator[list[Tensor]]:
    """Inside the block the head reads the first token alone, and what it would have read, [B, T, D], is in the list:
    for calls without labels. Auxiliary losses are reported as with a loss."""
    kept: list[Tensor] = []

    def first_token(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept.append(given[0])
        return (given[0][:, :1],)

    hook, before = model.lm_head.register_forward_pre_hook(first_token), model.under_a_head
    model.under_a_head = True
    try:
        yield kept
    finally:
        model.under_a_head = before
        hook.remove()


@torch.no_grad()
def statistics_in_pieces(head: Any, states: Tensor, labels: Tensor, vocab_size: int, *, next_token: bool) -> Tensor:
    """[`token_statistics`] [B, 3] of the logits that `head` makes of states [B, T, D]; labels [B, T], -100 where there
    is no target."""
    if next_token:
        states, labels = states[:, :-1], labels[:, 1:]
    target = labels.to(states.device) != IGNORE_INDEX
    rows, chosen, wanted = target.nonzero()[:, 0], states[target], labels.to(states.device)[target]
    result = torch.zeros(len(labels), 3, device=states.device, dtype=torch.float32)
    size = max(1, NUMBERS_AT_ONCE // vocab_size)
    for start in range(0, len(rows), size):
        piece = slice(start, start + size)
        logits = head(chosen[piece][:, None])
        result.index_add_(0, rows[piece], token_statistics(logits, wanted[piece][:, None], next_token=False))
    return result
