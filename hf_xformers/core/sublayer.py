# SPDX-License-Identifier: Apache-2.0
"""What every function that a layer frames has: attention, feed-forward, and what a block adds of its own."""

from __future__ import annotations

from torch import nn
from transformers.cache_utils import Cache

from .context import LayerContext


class Sublayer(nn.Module):
    """Base of the functions f of a layer, `x = leave(x, f(enter(x)))`.

    `forward(hidden_states [B, T, D], context)` of a feed-forward, and with `memory`, `past_key_values` and `step`
    next to them for what is planned as attention, gives a [`SublayerOutput`](context.py).
    """

    @property
    def takes_unpadded(self) -> bool:
        """Whether it may be given the real tokens of a batch as one row [1, N, D] (`context.unpadding`); one that may
        not is given the padded batch."""
        return False

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        """Called once per forward call and layer before the first layer runs: let the call make what layers can
        share, once (`context.prepare`). What carries gradients it is given by `context.start`."""


__all__ = ["Sublayer"]
