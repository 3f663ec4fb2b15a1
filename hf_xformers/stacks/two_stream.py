# SPDX-License-Identifier: Apache-2.0
"""XLNet's two streams: a stream of contents, and one of queries that do not know what stands at their places."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention.shared.base import KeyStates
from ..attention.shared.query_grid import PairsInSight, QueryGrid, ScatteredGrid
from ..core.call import Call, add_losses, can_inspect, dropout_rate
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import one_state
from .base import Stack, StackSpec
from .driver import Pass, StackOutput

ORDER, TARGETS = "perm_mask", "target_mapping"


class TwoStreamStack(Stack):
    """h_i <- layer(Q = h_i, KV = {h_j : j in S_i or j = i}), g_m <- layer(Q = g_m, KV = {h_j : j in S_{p(m)}}).

    Yang et al. 2019 (XLNet, arXiv 1906.08237, section 2.3). S_i are the places that come before i in an order of
    factorization, by the input `perm_mask` [B, T, T]: 1 where i must not see j (None: everybody sees everybody). The
    content stream h begins with the tokens, and a token always sees itself. The query stream g has one state for each
    target m, at the place p(m) that the input `target_mapping` [B, M, T] marks with 1; it begins with one learned
    vector for all of them, runs through the same layers, and reads the h that the layer reads. Without targets, h
    alone runs, and is the output; with them, g is, [B, M, D]. A row of the mapping that is all zero is no target.

    A target that sees nothing, as the first of an order, reads nothing but its place; transformers has it read the
    mean of all tokens, its own and later ones too.
    """

    undecayed = ("start",)

    dropout = dropout_rate("query_dropout")

    def __init__(self, config):
        super().__init__()
        self.start = nn.Parameter(torch.empty(config.hidden_size))
        self.dropout = config.hidden_dropout_prob

    def initialize(self, config, init) -> None:
        init.normal_(self.start, mean=0.0, std=config.initializer_range)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context, layers = run.hidden_states, run.context, run.layers
        order, mapping = context.inputs.get(ORDER), context.inputs.get(TARGETS)
        seen = None if order is None else self._seen(order, hidden_states)
        if seen is not None:
            itself = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device)
            context.keep(PairsInSight(seen | itself))
        for layer in layers:
            layer.prepare(context, None)
        queries, of_queries = None, context
        if mapping is not None:
            of_queries = self._context_of_queries(mapping, seen, hidden_states, context)
            queries = self.start.to(hidden_states.dtype).expand(*mapping.shape[:2], -1)
            queries = F.dropout(queries, self.dropout, self.training)
        elif torch.is_grad_enabled():
            hidden_states = hidden_states + 0.0 * self.start.sum()  # so that it has a gradient in every pass
        losses: dict[str, Tensor] = {}
        states = context.states
        for step, layer in enumerate(layers):
            given = {**states, **one_state(KeyStates(hidden_states))}
            if queries is None or step + 1 < len(layers):  # what the last layer makes of contents, no query reads
                hidden_states, states, found = layer(hidden_states, None, states, context=context, step=step)
                add_losses(losses, found)
            if queries is not None:
                queries, _, found = layer(queries, None, given, context=of_queries, step=step)
                add_losses(losses, found)
        return StackOutput(hidden_states if queries is None else queries, of_queries, losses, states=states)

    @staticmethod
    def _seen(order: Tensor, states: Tensor) -> Tensor:
        """[B, T, T] boolean of the input `perm_mask`."""
        batch, length = states.shape[:2]
        if tuple(order.shape) != (batch, length, length):
            raise ValueError(
                f"`{ORDER}` must be [batch, length, length] = {[batch, length, length]}, 1 where the first token must"
                f" not see the second, got {list(order.shape)}."
            )
        return order == 0

    @staticmethod
    def _context_of_queries(mapping: Tensor, seen: Tensor | None, states: Tensor, context: Call) -> Call:
        """The call as queries see it: they are as many as targets, and stand at their places."""
        batch, length = states.shape[:2]
        if mapping.ndim != 3 or (mapping.shape[0], mapping.shape[2]) != (batch, length):
            raise ValueError(
                f"`{TARGETS}` must be [batch, targets, length] with {batch} texts of {length} tokens, 1 where a target"
                f" stands, got {list(mapping.shape)}."
            )
        marked = mapping != 0
        if can_inspect() and bool((marked.sum(-1) > 1).any()):
            raise ValueError(f"`{TARGETS}` marks several tokens for one target; give each row a single 1.")
        real, places = marked.any(-1), marked.int().argmax(-1)
        queries = copy.copy(context)
        index = torch.arange(mapping.shape[1], device=states.device)
        queries.query_index, queries.positions = index, context.positions.expand(batch, -1).gather(1, places)
        queries.padding_mask, queries.fresh = real, True
        types = context.inputs.get("token_type_ids")
        both = (None, None) if types is None else (types.expand(batch, -1).gather(1, places), types)
        queries.made = dict(context.made)
        queries.keep(QueryGrid(ScatteredGrid(places=places, keys=length), length, context.padding_mask, both))
        if seen is not None:
            queries.keep(PairsInSight(seen.gather(1, places[..., None].expand(-1, -1, length))))
        return queries


@register("stack", "two_stream")
class TwoStreamSpec(StackSpec):
    """A stream of contents and one of queries, for predictions in any order."""

    summary = "with targets, a second stream of queries that do not know the tokens at their places"
    inputs = (ORDER, TARGETS)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "stack 'two_stream' takes its order from `perm_mask` and cannot stand in a decoder; use 'plain' there."
            )
        if HandOver.SCATTERED_QUERIES not in config.attention.reads:
            raise ValueError(
                "stack 'two_stream' has queries at chosen places, which attention"
                f" {config.attention.type!r} does not know; set `attention='transformer_xl'`, or `stack='plain'`."
            )
        if config.block.mixes or "unpadding" not in config.block.supports:
            raise ValueError(
                "stack 'two_stream' hides tokens in attention alone, and a target would learn of them through block"
                f" {config.block.type!r}, which reads other tokens as well; set `block='vanilla'`, or `stack='plain'`."
            )
        if config.feedforward.inputs:
            raise ValueError(
                "stack 'two_stream' has queries that must not know the tokens at their places, by which feedforward"
                f" {config.feedforward.type!r} chooses; use another feed-forward, e.g. 'gelu'."
            )
        if config.normalization.over_tokens:
            raise ValueError(
                f"stack 'two_stream' hides tokens, over which normalization {config.normalization.type!r} takes"
                " statistics; set `normalization='layer_norm'`, or `stack='plain'`."
            )
        if config.position.acts:
            raise ValueError(
                f"stack 'two_stream' starts its queries from one vector, without position {config.position.type!r};"
                " use 'none' (the attention knows positions)."
            )
        if not config.residual.enters_as_is:
            raise ValueError(
                f"stack 'two_stream' reads a layer's input as it is, got residual {config.residual.type!r}; use"
                " 'post_ln'."
            )

    def build(self, config, **where) -> TwoStreamStack:
        return TwoStreamStack(config)
