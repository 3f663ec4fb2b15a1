# SPDX-License-Identifier: Apache-2.0
"""Dynamic mask attention: how much a query sees at each distance is learned, and depends on what it says."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..ops.common.products import widened
from ..ops.score_terms.terms import QueryBlock
from ..position.score_terms import SelfAttentionTerms
from .shared.base import Attention
from .shared.spec import AttentionSpec
from .shared.term_blocks import attend_with_terms, weights_with_terms


class DynamicMaskAttention(Attention):
    """o_i = sum_j M_ij exp(s q_i k_j) v_j / sum_j M_ij exp(s q_i k_j), M^h_ij = sigmoid(x_i W + P_(i - j) + U_h).

    Fan, Gong, Liu, Wei, Wang, Jiao, Duan, Zhang and Huang 2021 (arXiv 2103.13597), equations 5 and 8. M = 1 is plain
    attention, M = identity a map of single tokens. P has a number for each distance before and after the query, 0 for
    the query itself, and one for all distances from `max_distance` on. `relu`: the heads are rectified before the
    output projection, as in the released code.

    log M = logsigmoid(...) is added to scores, for a block of queries at a time. Time O(T^2 D), memory O(T). State:
    keys and values of all tokens seen.
    """

    spec: DynamicMaskSpec
    undecayed = ("distances", "head_offset")

    joins_projections = True

    def __init__(self, config, spec: DynamicMaskSpec, **where):
        super().__init__(config, spec, **where)
        self.query_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.distances = nn.Parameter(torch.empty(2, spec.max_distance))  # of keys before and after the query
        self.head_offset = nn.Parameter(torch.empty(self.num_heads))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.xavier_uniform_(self.query_gate.weight)
        init.normal_(self.distances)
        init.normal_(self.head_offset)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        terms = self._terms(hidden_states, context, key.shape[2])
        inputs = (query * self.scaling, self.repeated(key), self.repeated(value), terms, self.dropout_now)
        weights: Tensor | None = None
        if self.wants_weights(context):
            output, weights = weights_with_terms(*inputs)
        else:
            output = attend_with_terms(*inputs)
        return SublayerOutput(self.written(output, context, hidden_states), weights)

    def written(self, output: Tensor, context: Call, hidden_states: Tensor) -> Tensor:
        return super().written(torch.relu(output) if self.spec.relu else output, context, hidden_states)

    def _terms(self, hidden_states: Tensor, context: Call, num_keys: int) -> DynamicMaskTerms:
        with torch.autocast(hidden_states.device.type, enabled=False):
            gate = self.query_gate(hidden_states)  # [B, T, 1]
            gate, offset, distances = widened(gate, self.head_offset, self.distances)
            of_queries = gate + offset[:, None, None, None]  # [H, B, T, 1]
            before, after = distances
            line = torch.cat((before.flip(0), before.new_zeros(1), after))[None]  # by key - query
        return DynamicMaskTerms(self.scaling, (of_queries, line), context, num_keys)


class DynamicMaskTerms(SelfAttentionTerms):
    """logsigmoid(c_i + P_(j - i)). Tables: c of queries and heads, [H, B, T, 1], and P, [1, 2 n + 1]."""

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (tables[0].transpose(0, 1),)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        most = tables[1].shape[1] // 2
        away = self.context.key_index[None, : block.keys] - self.context.query_index[block.rows, None]
        return F.logsigmoid(block.by_query[0] + tables[1][0, away.clamp(-most, most) + most])


@register("attention", "dynamic_mask", aliases=("dman",))
class DynamicMaskSpec(AttentionSpec):
    """max_distance: distances from which on all share a number. relu: whether heads are rectified before the output
    projection."""

    summary = "how much a query sees at each distance depends on what it says"
    supports = frozenset({"packed_rows", "pair_mask"})
    head_options = frozenset({"norm"})

    max_distance: int = bounded(1024, least=1)
    relu: bool = True

    def build(self, config, **where) -> DynamicMaskAttention:
        return DynamicMaskAttention(config, self, **where)
