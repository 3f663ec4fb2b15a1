# SPDX-License-Identifier: Apache-2.0
"""What mechanisms share whose layers hand their scores, or their weights, on to the next ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.call import Call
from ...core.prepared import State
from ...core.visibility import visible_pairs
from .base import Attention
from .query_blocks import visible_softmax


class Link(State):
    """What a layer passes on to the next: scores [B, H, T, S], how many layers' they are the sum of [1], queries
    [B, H, T, .] and keys [B, K, S, .], or weights [B, H, T, S]."""

    scores: Tensor | None = None
    depth: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    weights: Tensor | None = None


class ScoreChain(Attention):
    """Base of attention that reads what the layer below passed on.

    What is passed on is a state, so that gradients and activation checkpointing follow it. A chain begins anew in each
    forward call; self- and cross-attention have chains of their own. Scores are passed on as they are before the
    mask and the position's bias, which act in every layer, and in float32 at least: sums over many layers are too
    coarse in half precision, and leave its range.

    chain_name: tells it from other chains in the same call.
    """

    chain_name: ClassVar[str]

    def __init__(self, config, spec, **where):
        super().__init__(config, spec, **where)
        self.slot = (self.chain_name, self.cross)

    def handed(self, context: Call) -> Link:
        """What a layer below has passed on."""
        return context.state(Link, self.slot) or Link()

    def check_fit(self, what: str, handed: torch.Size, own: torch.Size) -> None:
        """Raises `ValueError` where what was passed on has another shape than what it is combined with."""
        if handed != own:
            raise ValueError(
                f"{self.spec.type} layer {self.layer_idx} has {what} {list(own)}, but the layers below pass on"
                f" {list(handed)}; all layers of a chain need the same numbers of heads and the same length."
            )

    def weigh(self, scores: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor, Tensor]:
        """scores [B, H, T, S] without mask and bias, value [B, H, S, d] -> output [B, T, H, d], weights [B, H, T, S],
        and weights after dropout."""
        bias = self.score_bias(context)
        if bias is not None:
            scores = scores + bias.block(context.query_index, context.key_index)
        weights = visible_softmax(scores, visible_pairs(context, self.cross)).to(value.dtype)
        dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        return torch.matmul(dropped, value).transpose(1, 2), weights, dropped
