# SPDX-License-Identifier: Apache-2.0
"""A feed-forward sublayer in gated parts (conditional computation)."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.call import Call, SublayerOutput, can_inspect, dropout_rate
from ..core.components import bounded, register
from ..core.gates import Gates, check_stack, gate_usage
from ..core.initialization import start_projections
from ..normalization.base import norm_inputs
from .base import FeedForward, FeedForwardSpec


class Part(nn.Module):
    """LN_out(W_2 relu(W_1 LN_in(x))) with a share of the inner width."""

    dropout = dropout_rate("activation_dropout")

    def __init__(self, config, width: int):
        super().__init__()
        self.input_norm, self.output_norm = config.normalization.build(config), config.normalization.build(config)
        self.up_proj = nn.Linear(config.hidden_size, width)
        self.down_proj = nn.Linear(width, config.hidden_size)
        self.dropout = config.activation_dropout_prob

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=[self.up_proj], output=self.down_proj)

    def forward(self, tokens: Tensor, **given: Tensor | None) -> Tensor:
        """tokens [..., D] -> [..., D]; given: the mask for norms over tokens."""
        inner = torch.relu(self.up_proj(self.input_norm(tokens, **given)))
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        return self.output_norm(self.down_proj(inner), **given)


class ConditionalFeedForward(FeedForward):
    """f(x) = sum_m g_m * part_m(x), m = 1 .. M (Bapna et al. 2020, arXiv 2002.07106).

    The M parts share the inner width, and g_m [B, T, 1] are the gates of a token, which read the last part's
    normalized input (lingvo's released code). In evaluation gates are 0 or 1, and a part computes the tokens that its
    gate lets through; a recorded graph computes all of them. Norms are inside: the residual frame is 'bare'.
    """

    def __init__(self, config, spec: ConditionalFeedForwardSpec):
        super().__init__()
        width = config.intermediate_size // spec.parts
        self.parts = nn.ModuleList(Part(config, width) for _ in range(spec.parts))
        self.gate = Gates(config, spec.parts)
        self.normalization = config.normalization
        self.chunk_size = config.chunk_size_feed_forward

    def transform(self, tokens: Tensor, gates: Tensor, **given: Tensor | None) -> Tensor:
        """tokens [B, T, D], gates [B, T, M] -> [B, T, D]; given: the mask for norms over tokens."""
        if self.training or not can_inspect():
            parts = [part(tokens, **given) * gates[..., m, None] for m, part in enumerate(self.parts)]
            return torch.stack(parts).sum(0)
        flat, doors = tokens.flatten(0, -2), gates.flatten(0, -2)
        output = torch.zeros_like(flat)
        for m, part in enumerate(self.parts):
            index = doors[:, m].nonzero().squeeze(-1)
            output = output.index_add(0, index, part(flat[index]).to(output.dtype))
        return output.view_as(tokens)

    def forward(self, hidden_states: Tensor, context: Call) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D]; `chunk_size_feed_forward` bounds the tokens in flight."""
        given = norm_inputs(self.normalization, context)
        last = cast(Part, self.parts[-1])
        gates = self.gate(last.input_norm(hidden_states, **given), context)
        if self.chunk_size and not given:
            size = self.chunk_size
            pieces = zip(hidden_states.split(size, dim=1), gates.split(size, dim=1), strict=True)
            output = torch.cat([self.transform(*piece) for piece in pieces], dim=1)
        else:
            output = self.transform(hidden_states, gates, **given)
        usage = gate_usage((gates, context.query_padding_mask)) if self.training else None
        return SublayerOutput(output, aux_losses=usage)


@register("feedforward", "conditional")
class ConditionalFeedForwardSpec(FeedForwardSpec):
    """parts: M, into which the inner width is cut."""

    summary = "a feed-forward in parts, each with a gate for each token"

    parts: int = bounded(4, least=1)

    def check(self, config) -> None:
        check_stack(self, config)
        if config.intermediate_size % self.parts:
            raise ValueError(
                f"conditional feed-forward cuts `intermediate_size` {config.intermediate_size} into {self.parts}"
                " parts, which does not come out even; change one of them."
            )

    def build(self, config, **where) -> ConditionalFeedForward:
        return ConditionalFeedForward(config, self)
