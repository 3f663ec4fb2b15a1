"""Attention with gates: which tokens ask, and which are read (conditional computation)."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..core.components import register
from ..core.context import LayerContext, SublayerOutput, self_attention_cache
from ..core.gates import Gates, check_stack, gate_usage
from ..normalization.base import NormSpec, norm_inputs
from .dense import DenseAttention
from .shared.base import AttentionSpec


class ConditionalAttention(DenseAttention):
    """f(x) = g_q * LN_out(softmax attention of LN_in(x) over g_s * s) (Bapna et al. 2020, arXiv 2002.07106).

    s is LN_in(x), or the memory in cross-attention; g_q and g_s [B, T, 1] are gates of the asking and of the read
    token. A closed g_s multiplies the vector before the key and value projections, so that the token is still read, as
    their biases; it keeps its place in the cache. Norms are inside: the residual frame is 'bare'.
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
        context: LayerContext,
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
        if self.cross:
            query, key, value = self.project_cross(asking, source, past_key_values, step)
        else:
            query = self.queries(asking)
            key, value = self.keys(cast(Tensor, source)), self.heads(self.v_proj(source))
            query, key = self.turned(query, key, context)
            cache = self_attention_cache(past_key_values)
            if cache is not None:
                key, value = cache.update(key, value, step)
            key = self.turned_late(key, context)
        output, weights = self.attend(query, key, value, context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        output = self.output_norm(output, **norm_inputs(self.normalization, context))
        usage = gate_usage(*gates) if self.training else None
        return SublayerOutput(output, weights, gate=gates[0][0], aux_losses=usage)


@register("attention", "conditional")
class ConditionalAttentionSpec(AttentionSpec):
    """gate_source: also gate the tokens that are read (keys and values)."""

    summary = "softmax attention with a gate for each asking and each read token"
    normalizes_heads = True
    cross = True
    score_bias = True
    explicit_mask = True
    packed = True

    gate_source: bool = True

    def check(self, config) -> None:
        check_stack(self, config)

    def build(self, config, **where) -> ConditionalAttention:
        return ConditionalAttention(config, self, **where)
