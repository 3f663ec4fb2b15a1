# SPDX-License-Identifier: Apache-2.0
"""BP-Transformer's layer: spans of the text go through its sublayers next to the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import States, one_state
from ..core.text_tree import Spans, SpansBeside, make_tree
from .base import LayerOutput, SublayerPlan, XFormerLayer
from .vanilla import VanillaBlockSpec


class BPTransformerLayer(XFormerLayer):
    """Tokens [B, T, D], and behind them spans [B, N, D], which start as zeros and are passed on as a state, go through
    one attention and one feed-forward with the same parameters and norms (Ye et al. 2019, arXiv 1911.04070, section
    3.2). Cross-attention is for tokens alone. With a cache the spans are those that this call's tokens complete."""

    @staticmethod
    def wide(context: Call) -> Call:
        """The call as functions of single nodes see it: spans are further tokens."""

        def make() -> SpansBeside:
            tree, real = make_tree(context), context.query_padding_mask
            index = torch.arange(context.query_index.shape[0] + tree.count, device=context.query_index.device)
            seen = context.derive(
                padding_mask=None if real is None else tree.with_spans(real, real.shape[0]),
                positions=F.pad(context.positions, (0, tree.count)),
                query_index=index,
                key_index=index,
                fresh=True,
                inputs_embeds=None,  # what is prepared has no gradient
            )
            return SpansBeside(seen)

        return context.prepare(SpansBeside, make).call

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        wide = self.wide(context)
        for entry in self.plan:
            self.function(entry).prepare(wide if entry.kind == "feedforward" else context, past_key_values)

    def run(self, hidden_states: Tensor, memory: Tensor | None, states: States, **given: Any) -> LayerOutput:
        length, count = hidden_states.shape[1], make_tree(given["context"]).count
        spans = states.pop((Spans, None), None)
        below = hidden_states.new_zeros(hidden_states.shape[0], count, hidden_states.shape[2])
        below = below if spans is None else spans.states.to(hidden_states.dtype)
        joined, states, losses = super().run(torch.cat([hidden_states, below], dim=1), memory, states, **given)
        hidden_states, above = joined.split([length, count], dim=1)
        return LayerOutput(hidden_states, {**states, **one_state(Spans(above))}, losses)

    def around(self, context: Call) -> Call:
        return self.wide(context).passing(context.states)

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        if entry.kind != "cross_attention":
            return super().run_entered(entry, entered, context, memory, past_key_values, step)
        length = context.query_index.shape[0]
        result = super().run_entered(entry, entered[:, :length], context, memory, past_key_values, step)
        more = entered.shape[1] - length
        gate = None if result.gate is None else F.pad(result.gate, (0, 0, 0, more))
        return result._replace(output=F.pad(result.output, (0, 0, 0, more)), gate=gate)


@register("block", "bp_transformer")
class BPTransformerBlockSpec(VanillaBlockSpec):
    """Attention and feed-forward of tokens and of spans of the text, which attention 'bp_transformer' makes."""

    reads = frozenset({HandOver.SPANS})
    supports = frozenset()
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "its spans are those of rows"}
    summary = "attention, (cross-attention,) feed-forward, for tokens and for spans of the text"

    def check(self, config) -> None:
        carry = config.attention.carries(config)
        if carry is None or carry.kind is not Spans:
            raise ValueError(
                f"block 'bp_transformer' takes spans along that attention 'bp_transformer' makes, got attention"
                f" {config.attention.type!r}; use the block 'vanilla'."
            )
        if config.feedforward.inputs:
            raise ValueError(
                f"block 'bp_transformer' has spans next to tokens, for which the model has no"
                f" {', '.join(config.feedforward.inputs)} that feedforward {config.feedforward.type!r} reads; use"
                " another feed-forward, e.g. 'gelu'."
            )

    def build(self, config, **where) -> BPTransformerLayer:
        return BPTransformerLayer(config, self, **where)
