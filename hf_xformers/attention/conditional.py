# SPDX-License-Identifier: Apache-2.0
"""Attention with gates: which tokens ask, and which are read (conditional computation)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, can_inspect, self_attention_cache
from ..core.components import register
from ..core.gates import Gates, check_stack, gate_usage
from ..core.segment_memory import take_slots
from ..normalization.base import NormSpec, norm_inputs
from ..ops.common.fused import fused_attention
from ..ops.common.real_tokens import real_first
from .dense import DenseAttention
from .shared.spec import AttentionSpec

# Share of a row's tokens that may ask, above which all are computed: then no kernel needs a mask of pairs.
WORTHWHILE = 0.75


class ConditionalAttention(DenseAttention):
    """f(x) = g_q * LN_out(softmax attention of LN_in(x) over g_s * s) (Bapna et al. 2020, arXiv 2002.07106).

    s is LN_in(x), or the memory in cross-attention; g_q and g_s [B, T, 1] are gates of the asking and of the read
    token. A closed g_s multiplies the vector before the key and value projections, so that the token is still read, as
    their biases; it keeps its place in the cache. Norms are inside: the residual frame is 'bare'.

    In evaluation a token with closed g_q asks nothing: queries, scores and output are computed for the others alone,
    as many of each row as of the row with the most.
    """

    spec: ConditionalAttentionSpec

    def __init__(self, config, spec: ConditionalAttentionSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.normalization: NormSpec = config.normalization
        self.input_norm, self.output_norm = self.normalization.build(config), self.normalization.build(config)
        self.query_gate = Gates(config, 1)
        self.source_gate = Gates(config, 1) if spec.gate_source else None

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
        asking = self.input_norm(hidden_states, **norm_inputs(self.normalization, context))
        gates = [(self.query_gate(asking, context), context.query_padding_mask)]
        source = memory if self.cross else asking
        known = (
            self.cross and isinstance(past_key_values, EncoderDecoderCache) and past_key_values.is_updated.get(step)
        )
        if self.source_gate is not None and not known:
            real = context.memory_padding_mask if self.cross else context.query_padding_mask
            gates.append((self.source_gate(source, context), real))
            source = source * gates[1][0]
        order = self._asking(gates[0][0], context)
        if self.cross:
            few = asking if order is None else take_slots(asking, order)
            query, key, value = self.project_cross(few, source, past_key_values, step)
        else:
            turns = self.rotation(context) is not None
            query = self.queries(asking if order is None or turns else take_slots(asking, order))
            key, value = self.keys(cast(Tensor, source)), self.heads(self.v_proj(source))
            query, key = self.turned(query, key, context)
            cache = self_attention_cache(past_key_values)
            if cache is not None:
                key, value = appended(cache, key, value, step)
            key = self.turned_late(key, context)
            if order is not None and turns:
                query = query.gather(2, order[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim))
        if order is not None:
            return SublayerOutput(self._answered(query, key, value, order, hidden_states, context), gate=gates[0][0])
        output, weights = self.attend(query, key, value, context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        output = self.output_norm(output, **norm_inputs(self.normalization, context))
        usage = gate_usage(*gates) if self.training else None
        return SublayerOutput(output, weights, gate=gates[0][0], aux_losses=usage)

    def _asking(self, gate: Tensor, context: Call) -> Tensor | None:
        """[B, n]: the tokens that ask, gate [B, T, 1] not 0, padded with others; None: all are computed."""
        recorded = self.wants_weights(context) or context.explicit_mask is not None or context.static
        plain = not (self.training or recorded) and context.implementation == "sdpa" and can_inspect()
        if not plain or norm_inputs(self.normalization, context) or self.score_bias(context) is not None:
            return None
        open_ = gate[..., 0] > 0
        most, length = max(int(open_.sum(1).max()), 1), open_.shape[1]
        if most > WORTHWHILE * length:
            return None
        return real_first(open_)[:, :most]

    def _answered(
        self, query: Tensor, key: Tensor, value: Tensor, order: Tensor, like: Tensor, context: Call
    ) -> Tensor:
        """What the queries [B, H, n, d] of the tokens `order` [B, n] have read, each in its place of [B, T, D]; zeros
        elsewhere."""
        mask = context.memory_padding_mask if self.cross else context.padding_mask
        mask = None if mask is None else mask[:, None]
        if not self.cross and context.segment_ids is not None:
            same = context.segment_ids.gather(1, order)[..., None] == context.segment_ids[:, None]
            mask = same if mask is None else mask & same
        if not self.cross and context.causal:
            earlier = context.key_index <= context.query_index[order][..., None]
            mask = earlier if mask is None else mask & earlier
        if mask is not None:
            mask = mask.expand(-1, order.shape[1], -1)
        read = fused_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask[:, None],
            scale=self.scaling,
            enable_gqa=True,
        )
        if mask is not None:  # a row of padding alone reads nothing
            read = read.masked_fill(~mask.any(-1)[:, None, :, None], 0.0)
        output = self.output_norm(self.o_proj(read.transpose(1, 2).flatten(2)))
        return torch.zeros_like(like).scatter(1, order[..., None].expand_as(output), output.to(like.dtype))


@register("attention", "conditional")
class ConditionalAttentionSpec(AttentionSpec):
    """gate_source: also gate the tokens that are read (keys and values)."""

    summary = "softmax attention with a gate for each asking and each read token"
    head_options = frozenset({"norm"})
    cross = True
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})

    gate_source: bool = True

    def check(self, config) -> None:
        check_stack(self, config)

    def build(self, config, **where) -> ConditionalAttention:
        return ConditionalAttention(config, self, **where)
