# SPDX-License-Identifier: Apache-2.0
"""BP-Transformer: a token reads its neighbors, and spans that are the longer the farther away they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from ..core.cache import KeepsMore
from ..core.call import Call, SublayerOutput, can_inspect, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.holes import take
from ..core.pooling import TextPooler, pool
from ..core.prepared import Carry
from ..core.text_tree import Spans, SpansBeside, Tree, make_tree
from ..ops.binary_partition import (
    covered,
    few_leaves,
    leaves_in_blocks,
    listed_spans,
    picks,
    spans_by_level,
    weigh,
)
from ..ops.common.products import wide_products
from .shared.base import Attention
from .shared.bucketed import FEW_QUERIES, BucketLayer
from .shared.spec import AttentionSpec


class TreeLayer(KeepsMore, BucketLayer):
    """Keys and values of tokens and, as labels [B, 2 K, d, M], of the spans that are complete."""

    def crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, tokens_to_remove)  # spans that are not complete any more are written over

    def add_spans(self, key: Tensor, value: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """key and value [B, K, n, d] of new spans, which stand from `start` [B or 1, 1] on in their list -> those of
        the first `total` spans."""
        new = torch.cat([key, value], dim=1).mT
        old = new[..., :0] if self.labels is None else self.labels
        rows = F.pad(old, (0, total + new.shape[-1] - old.shape[-1]))
        place = (start + torch.arange(new.shape[-1], device=new.device)).expand(new.shape[0], -1)
        rows = rows.scatter(3, place[:, None, None].expand_as(new), new)
        self.labels = rows[..., :total]
        found = self.labels.mT.chunk(2, dim=1)
        return found[0], found[1]


class BPTransformerAttention(Attention):
    """Ye et al. 2019 (arXiv 1911.04070), section 3. A text is cut in halves, and these again, down to single tokens:
    span u of level e stands for the tokens u 2^e .. (u + 1) 2^e - 1.

        token i:   o_i = sum_j softmax_j(q_i (k_j + a_ij) / sqrt(d)) v_j over i itself and, on each side, the next
                   `nodes_per_level` nodes of each level, which together cover the text once
        span u:    o_u = sum_j softmax_j(q_u k_j / sqrt(d)) v_j over the tokens j of the span

    a_ij is a learned vector [d] for the level at which a node is picked, up to `max_level`, the side and the number of
    the pick; heads share it. Spans have states, which start as zeros, and go through the same projections and
    feed-forward as tokens (block `bp_transformer`); alone, without that block, this is the first layer.

    A decoder reads to its left, spans whose tokens are all past. The tree begins at a row's first real token. Time
    O(T k log(T / k) d) besides the projections of 2 T nodes. State: keys and values of tokens and complete spans; a
    new token reads O(k log(T / k)) of them, and the spans that it completes read their tokens. The weights given out
    are those of tokens, which share a span's weight equally.
    """

    spec: BPTransformerSpec

    def __init__(self, config, spec: BPTransformerSpec, **where):
        super().__init__(config, spec, **where)
        self.relative_key: nn.Parameter | None = None
        if spec.relative_labels:
            self.relative_key = nn.Parameter(torch.empty(spec.labels, self.head_dim))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.relative_key is not None:
            init.normal_(self.relative_key, mean=0.0, std=config.initializer_range)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        make_tree(context)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        tree, length = make_tree(context), context.query_index.shape[0]
        beside = context.find(SpansBeside) is not None
        if not beside:
            hidden_states = F.pad(hidden_states, (0, 0, 0, tree.count))
        query, key = self.normalized(self.q_proj(hidden_states), self.k_proj(hidden_states))
        parts = [self.heads(x).split([length, tree.count], 2) for x in (query, key, self.v_proj(hidden_states))]
        (query, of_spans), keys, values = parts
        if past_key_values is not None:
            keys, values = self._cached(keys, values, tree, past_key_values, self.layer_idx if step is None else step)
        key, value = (self._nodes(x, tree) for x in (keys, values))
        relative: Tensor | None = self.relative_key
        if relative is not None:
            relative = relative.to(torch.promote_types(query.dtype, torch.float32))
        weights = None
        if self.wants_weights(context):
            output, spans, weights = self._literal(query, of_spans, key, value, relative, tree, context)
        else:
            output, spans = self._efficient(query, of_spans, key, value, relative, tree, context)
        mask = context.query_padding_mask
        if mask is not None:
            output = output.masked_fill(~mask[:, None, :, None], 0.0)
        joined = torch.cat([output, spans.to(output.dtype)], dim=2) if beside else output
        return SublayerOutput(self.o_proj(joined.transpose(1, 2).flatten(2)), weights)

    def _cached(self, keys: Any, values: Any, tree: Tree, cache: Cache, step: int) -> tuple[Any, Any]:
        own = self_attention_cache(cache)
        layer = None if own is None or step >= len(own.layers) else own.layers[step]
        if not isinstance(layer, TreeLayer):
            raise ValueError(
                f"bp_transformer keeps keys and values of spans next to those of tokens, which the given"
                f" {type(own).__name__} has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        key, value = layer.update(keys[0], values[0])
        span_key, span_value = layer.add_spans(keys[1], values[1], tree.start, tree.total)
        return (key, span_key), (value, span_value)

    def _nodes(self, parts: tuple[Tensor, Tensor], tree: Tree) -> Tensor:
        """Keys or values [B, K, S, d] of tokens, [B, K, spans, d] of spans -> of all nodes, one for each head; real
        tokens first."""
        leaves = parts[0] if tree.order is None else take(parts[0], tree.order, 2)
        return self.repeated(torch.cat([leaves, parts[1]], dim=2))

    def _efficient(
        self,
        query: Tensor,
        of_spans: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor | None,
        tree: Tree,
        context: Call,
    ) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, d] of tokens, [B, H, N, d] of spans, key and value [B, H, S + spans, d] -> what both
        read."""
        slots, queries = context.key_index.shape[0], query.shape[2]
        real = None
        if tree.real is not None and not context.causal:  # what a decoder's real token reads is real
            real = tree.with_spans(tree.real, query.shape[0])
        few = not context.fresh and queries <= FEW_QUERIES
        places = torch.arange(slots, device=query.device)[None]
        if not (few or context.fresh):  # the queries of cached tokens are gone; their results are not asked for
            query = query.new_zeros(*query.shape[:2], slots, query.shape[3]).index_copy(2, context.query_index, query)
        if not few and tree.order is not None:
            query = take(query, tree.order, 2)
        elif few:
            places = tree.place
        shape: dict[str, Any] = {"count": self.spec.nodes_per_level, "clip": self.spec.max_level}
        shape["causal"] = context.causal
        options: dict[str, Any] = {"scale": self.scaling, "dropout": self.dropout_now}
        if few or not can_inspect():  # the plan of blocks is made outside of graphs
            read = picks(places, slots, **shape)
            output = few_leaves(query, key, value, real, relative, read, **options)
        else:
            output = leaves_in_blocks(query, key, value, real, relative, **shape, **options)
        if not few and tree.order is not None:
            output = take(output, tree.order.argsort(dim=-1), 2)
        if not (few or context.fresh):
            output = output.index_select(2, context.query_index)
        leaf_key, leaf_value = key[:, :, :slots], value[:, :, :slots]
        if context.fresh:
            spans = spans_by_level(of_spans, leaf_key, leaf_value, tree.real, context.causal, **options)
        else:
            spans = self._few_spans(of_spans, leaf_key, leaf_value, tree)
        return output, spans

    def _few_spans(self, query: Tensor, key: Tensor, value: Tensor, tree: Tree) -> Tensor:
        """Spans [B, H, N, d] that some new tokens complete, over the tokens [B, H, S, d] that one of them covers."""
        if not tree.count:
            return query
        first = int((tree.node << tree.level).min()) if can_inspect() else 0
        leaves = torch.arange(first, key.shape[2], device=key.device)
        allowed = covered(tree.level, tree.node, leaves)[:, None]
        scores = wide_products(query, key[:, :, first:])
        return weigh(scores, allowed, value[:, :, first:], self.scaling, self.dropout_now)

    def _literal(
        self,
        query: Tensor,
        of_spans: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor | None,
        tree: Tree,
        context: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same over all nodes with a mask; also the weights of tokens [B, H, T, S]."""
        slots, device = context.key_index.shape[0], query.device
        total = slots + tree.total
        nodes, labels = picks(tree.place, slots, self.spec.nodes_per_level, self.spec.max_level, context.causal)
        label = torch.full((*nodes.shape[:2], total + 1), -1, device=device)
        label = label.scatter(2, torch.where(nodes < 0, total, nodes), labels)[..., :total]
        levels, numbers, _ = listed_spans(slots, context.causal, device)
        inside = covered(levels, numbers, torch.arange(slots, device=device))  # [spans, S]
        real = torch.ones(1, slots, dtype=torch.bool, device=device) if tree.real is None else tree.real
        counts = inside[None] & real[:, None]  # [B or 1, spans, S]
        allowed = (label >= 0) & torch.cat([real, counts.any(-1)], dim=1)[:, None]
        scores = wide_products(query, key)
        if relative is not None:
            terms = wide_products(query, relative)
            index = label.clamp(min=0)[:, None].expand(*scores.shape[:2], -1, -1)
            scores = scores + terms.gather(-1, index)
        scores = (scores * self.scaling).masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed[:, None], 0.0).to(value.dtype)
        dropped = F.dropout(weights, self.dropout_now) if self.dropout_now else weights
        output = dropped @ value
        own = covered(tree.level, tree.node, torch.arange(slots, device=device)) & real[:, None]
        scores = wide_products(of_spans, key[:, :, :slots])
        spans = weigh(scores, own[:, None], value[:, :, :slots], self.scaling, self.dropout_now)
        shares = counts.to(weights.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
        seen = weights[..., :slots] + weights[..., slots:] @ shares[:, None]
        if tree.order is not None:  # back to where the tokens stand
            seen = take(seen, tree.order.argsort(dim=-1), 3)
        if context.query_padding_mask is not None:
            seen = seen.masked_fill(~context.query_padding_mask[:, None, :, None], 0.0)
        return output, spans, seen


class RootPooler(TextPooler):
    """The state of the root, the span that covers the whole text (Ye et al. 2019, section 3.3); of a single token
    itself."""

    state = Spans

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None, state: Spans | None = None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        first = pool(hidden_states, padding_mask, "first")
        if state is None or not state.states.shape[1]:
            return first
        root = state.states[:, -1]
        if padding_mask is None:
            return root
        count = padding_mask.to(root.device).sum(-1, keepdim=True)
        return torch.where(count > 1, root, first)


@register("attention", "bp_transformer")
class BPTransformerSpec(AttentionSpec):
    """nodes_per_level: k, nodes of each level that a token reads on each side (the paper tries 1 to 64). max_level:
    levels above it share their vectors of relative places. relative_labels: whether there are such vectors."""

    summary = "a token reads its neighbors, and spans that are the longer the farther away they are"
    acts = frozenset()
    head_options = frozenset({"norm"})
    knows_order = True
    why_not: ClassVar[Mapping[str, str]] = {"any_length": "its tree is that of a text of one length."}

    bias: bool = False
    nodes_per_level: int = bounded(4, "step", least=1)
    max_level: int = bounded(10, "clip_dist", least=0)
    relative_labels: bool = True

    @property
    def labels(self) -> int:
        return (2 * self.nodes_per_level + 1) * (self.max_level + 1)

    def check(self, config) -> None:
        if HandOver.SPANS not in config.block.reads:
            raise ValueError(
                f"bp_transformer has states of spans, which go through a layer next to the tokens, and block"
                f" {config.block.type!r} takes none along; set `block='bp_transformer'`."
            )

    def carries(self, config) -> Carry:
        return Carry(Spans, handed_on=True, throughout=True, reach="pooler")

    def build_pooler(self, config) -> RootPooler | None:
        return None if config.is_decoder else RootPooler()

    def cache_layer(self, config, layer_idx: int = 0) -> TreeLayer:
        return TreeLayer()

    def build(self, config, **where) -> BPTransformerAttention:
        return BPTransformerAttention(config, self, **where)
