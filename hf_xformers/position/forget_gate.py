# SPDX-License-Identifier: Apache-2.0
"""Forget gates: scores fall with what tokens in between say is to be forgotten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import register
from ..core.prepared import one_state
from ..ops.common.products import widened
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTerms, TokenNumbers
from .score_terms import SelfAttentionTerms


class ForgetTerms(PositionTerms):
    """score_ij += sum_{j < t <= i} log f_t, f_t = sigmoid(w_h x_t + b_h), x_t the attention's input.

    Lin et al. 2025 (arXiv 2503.02130), eqs. 4 and 5. The sum is c_i - c_j with c = cumsum(log f), made in tiles of
    queries; padding forgets nothing. State next to keys and values: one number for each head and token.
    """

    def __init__(self, config, spec: ForgetGateSpec):
        super().__init__()
        self.start = spec.start
        self.forget_proj = nn.Linear(config.hidden_size, config.num_attention_heads)

    def initialize(self, config, init) -> None:
        init.constant_(self.forget_proj.bias, self.start)

    def of_states(self, hidden_states: Tensor, context: Call) -> Call:
        gates = F.logsigmoid(*widened(self.forget_proj(hidden_states))).transpose(1, 2)
        padding = context.query_padding_mask
        if padding is not None:
            gates = gates.masked_fill(~padding[:, None], 0.0)
        return context.passing({**context.states, **one_state(TokenNumbers(gates))})

    def score_terms(self, attention: Any, scale: float, context: Call) -> ForgetScores:
        gates = context.given(TokenNumbers).numbers
        gates = F.pad(gates, (context.key_index.shape[0] - gates.shape[2], 0))  # what a stack has put before the text
        return ForgetScores(scale, (_in_two_parts(gates).transpose(0, 1),), context)


def _in_two_parts(gates: Tensor) -> Tensor:
    """log f [B, H, S] -> c [B, H, S, 2] as the sum of two numbers: a difference of sums of thousands of tokens has
    nearly all the digits of its type."""
    if gates.device.type == "mps":  # it knows no wider numbers
        sums = gates.cumsum(-1)
        return torch.stack((sums, torch.zeros_like(sums)), dim=-1)
    sums = gates.double().cumsum(-1)
    rounded = sums.to(gates.dtype)
    return torch.stack((rounded, (sums - rounded.double()).to(gates.dtype)), dim=-1)


class ForgetScores(SelfAttentionTerms):
    """The terms of one call. Table: c [H, B, S, 2] of all keys."""

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        places = self.context.query_index - self.context.key_index[0]
        return (tables[0].index_select(2, places).transpose(0, 1),)

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (tables[0].transpose(0, 1),)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        return _differences(block.by_query[0], block.by_key[0].take(0, block.keys))

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        return _differences(pairs.by_query[0], pairs.by_key[0])


def _differences(queries: Tensor, keys: Tensor) -> Tensor:
    """c of queries [..., t, 2] and of keys [..., s, 2] -> c_i - c_j, [..., t, s]."""
    (first, rest), (keys_first, keys_rest) = queries.split(1, dim=-1), keys.mT.split(1, dim=-2)
    return (first - keys_first) + (rest - keys_rest)


@register("position", "forget_gate", aliases=("forgetting", "fox"))
class ForgetGateSpec(PositionSpec):
    """start: b, the bias of the gates, at the start: at 0 they forget a half of what is before each token, at 5 a
    hundredth of that, so that a trained model which is given gates begins as it was."""

    summary = "scores fall with what gates of the tokens in between forget"
    acts = frozenset({"score_terms"})
    needs_causal = True

    start: float | int = 0.0

    def check(self, config) -> None:
        if "token_numbers" not in config.attention.supports:
            raise ValueError(
                f"position 'forget_gate' keeps a number for each token next to its key, which attention"
                f" {config.attention.type!r} has no place for; use 'dense', 'band_attention' or another pattern of"
                " positions."
            )

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> ForgetTerms:
        return ForgetTerms(config, self)
