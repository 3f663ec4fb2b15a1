# SPDX-License-Identifier: Apache-2.0
"""Routing attention: local heads, and heads that attend inside clusters found by online k-means."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import block_local
from ..ops.bucketed.attention import clustered_attention, clustered_reference
from ..ops.bucketed.kmeans import sums_of_clusters
from ..ops.common.real_tokens import first_real
from ..ops.score_terms.attention import tile_attention
from ..ops.score_terms.bucket_tiles import cluster_attention
from ..ops.score_terms.pattern_tiles import pattern_tiles
from ..position.score_terms import SelfAttentionTerms
from .shared.base import Attention, literal_softmax_attention
from .shared.bucketed import FEW_QUERIES, BucketedSpec, BucketLayer, labels_of_all, recent_attention
from .shared.centroids import LearnsCentroids, NothingLearnt, Places, Routes, unit_length


class RoutingAttention(LearnsCentroids, Attention):
    """Roy, Saffar, Vaswani, Grangier 2021 (arXiv 2003.05997), section 4.1 and algorithm 1.

    The first heads are local: blocks of `block_size` tokens, a query reads its own block and the one before (an
    encoder also the one after). The last `num_routing_heads` are routed: with x~ = LN(x) per head without scale or
    bias, and centroids mu_c,

        mu(x)  = argmax_c x~ mu_c
        o_i    = sum_{j : mu(k_j) = mu(q_i)} softmax_j(scale * q~_i k~_j) v_j     (eq. 11 of the survey)

    where a cluster holds w = `window_size` tokens. As in the paper (section 4.1, "complexity") there are k = sqrt(n)
    clusters of w = n / k tokens for a text of n tokens, unless the config has numbers: of the centroids the first k,
    for each row of the batch by its real tokens, in a strictly causal model for the text up to about the token itself
    ([`Stage`]).

    Encoder: each centroid takes the w nearest queries and the w nearest keys;
    a token in several clusters gets the mean, one in none gets 0. Decoder: keys are the queries (shared projection), a
    token belongs to its own nearest centroid and reads the w most recent tokens of that cluster, itself included
    (strict causality; it can be cached). The paper lets decoders choose the w nearest of the whole text as well; that
    form is available and cannot generate.

    Training moves centroids by exponential averages of the vectors nearest to them, over all real tokens of the batch
    and all processes: m <- lam m + (1 - lam) sum x~, c <- lam c + (1 - lam) n, mu = m / c (released code; counts start
    at 1), and adds the commitment loss beta * mean |x~ - stopgrad(mu(x))|^2 (auxiliary loss `routing_commitment`).

    The released code has no temperature (`scale=1.0`), which lets a query's own key dominate; the default is 1 /
    sqrt(d).
    Shapes: [B, T, D] -> [B, T, D]. Time O(T * (K + w) * d) per routed head, so O(T^1.5 d). State: keys, values,
    labels.
    """

    spec: RoutingSpec
    centroids: Tensor
    counts: Tensor

    def __init__(self, config, spec: RoutingSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.routed = spec.routed_heads(config, layer_idx)
        self.local = self.num_heads - self.routed
        self.shared = spec.shares(config)
        self.clusters = spec.most_clusters(config)
        self.stages, self.stage_clusters = self._stages(config)
        self.blocks = block_local(spec.block_size, before=1, after=0 if self.is_causal else 1)
        self.key_heads = self.local if self.shared else self.num_heads
        del self.k_proj
        if self.key_heads:
            self.k_proj = nn.Linear(config.hidden_size, self.key_heads * self.head_dim, bias=spec.bias)
        if self.routed:
            self.register_buffer("centroids", self.draw_centroids())
            self.register_buffer("counts", torch.ones(self.routed, self.clusters))

    def initialize(self, config, init) -> None:
        keys = [self.k_proj] if self.key_heads else []
        start_projections(config, init, inputs=(self.q_proj, *keys, self.v_proj), output=self.o_proj)
        self.start_queries(config, init)
        if self.routed:
            init.copy_(self.centroids, self.draw_centroids())
            init.ones_(self.counts)

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
        query, value = self.heads(self.q_proj(hidden_states)), self.heads(self.v_proj(hidden_states))
        key = self.heads(self.k_proj(hidden_states)) if self.key_heads else query[:, :0]
        (local_query, routed_query), (local_value, routed_value) = self._parted(query), self._parted(value)
        local_key, routed_key = (key, None) if self.shared else self._parted(key)
        # Positions are for the local heads, and routing is by content, before anything turns.
        local_query, local_key = self.turned(local_query, local_key, context)
        routed_query = _normalized_heads(routed_query)
        routed_key = None if routed_key is None else _normalized_heads(routed_key)
        routes, aux_losses = None, None
        if self.routed:
            routes, aux_losses = self._routes(routed_query, routed_key, context, step)
        routed_key = routed_query if routed_key is None else routed_key
        cache = self_attention_cache(past_key_values)
        if self.spec.rotates_routed:
            routed_query, routed_key = self.turned(routed_query, routed_key, context)
        if cache is not None:
            self._check_cache(cache, step)
            key, value = appended(cache, torch.cat([local_key, routed_key], dim=1), value, step)
            (local_key, routed_key), (local_value, routed_value) = self._parted(key), self._parted(value)
        local_key = self.turned_late(local_key, context)
        routed_key = self.turned_late(routed_key, context) if self.spec.rotates_routed else routed_key
        parts = []
        added = self.score_terms(context)
        of_local = None if added is None else added.of_heads(slice(0, self.local))
        of_routed = None if added is None else added.of_heads(slice(self.local, None))
        if self.local:
            parts.append(self._local(local_query, local_key, local_value, context, of_local))
        if routes is not None:
            inputs = (routed_query, routed_key, routed_value)
            parts.append(self._routed(*inputs, routes, context, cache, step, of_routed))
        if self.wants_weights(context):  # what is returned is what is used, so that gradients reach it
            weights = torch.cat([seen for _, seen in parts if seen is not None], dim=1)
            dropped = F.dropout(weights, self.dropout, self.training)
            output = dropped @ value
            output = (output if added is None else output + added.values_of_all(dropped)).transpose(1, 2)
        else:
            weights, outputs = None, [part.transpose(1, 2) for part, _ in parts]
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return SublayerOutput(self.o_proj(output.flatten(2)), weights, aux_losses=aux_losses)

    def _check_cache(self, cache: Cache, step: int) -> None:
        """Refuses a cache that cannot serve what is set. Raises `ValueError`."""
        if "generate" in self.spec.why_not:
            raise ValueError(self.spec.why_not["generate"])
        layer = cache.layers[step] if step < len(cache.layers) else None
        if self.spec.rotates_routed and self.routed and not isinstance(layer, BucketLayer):
            raise ValueError(
                f"routing_transformer with `rotates_routed=True` needs a cache that keeps the clusters of keys, which"
                f" {type(cache).__name__} does not: rotated keys do not tell them; leave `cache_implementation` out,"
                " or make the cache with `hf_xformers.core.cache.make_cache(config)`."
            )

    def _parted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The local and the routed heads of [B, H, T, d]. Cutting nothing off costs a copy in the backward pass."""
        if self.local and self.routed:
            return x.split((self.local, self.routed), dim=1)
        return (x, x[:, :0]) if self.local else (x[:, :0], x)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not torch.is_grad_enabled():  # of the whole call: checkpointing switches gradients off for a layer
            context.keep(NothingLearnt())

    def _routes(
        self, query: Tensor, key: Tensor | None, context: Call, step: int
    ) -> tuple[Routes, dict[str, Tensor] | None]:
        """The routes of this call, found and learnt from once: when activations are computed again (reversible layers,
        checkpointing), centroids have moved already, and their decisions must stay as they were."""
        valid = context.query_padding_mask
        routes = context.find(Routes, step)
        # What is frozen (under adapters) stays as it is.
        learns = routes is None and self.training and self.q_proj.weight.requires_grad
        learns = learns and context.find(NothingLearnt) is None
        commits = self.training and self.spec.commitment_weight != 0
        if routes is None:
            routes = self.route(query, key, valid)
            context.keep(routes, step)
        clusters, count = [], self.clusters
        if learns or commits:
            clusters.append(sums_of_clusters(query, routes.query_labels, count, valid))
            if key is not None and routes.key_labels is not None:
                clusters.append(sums_of_clusters(key, routes.key_labels, count, valid))
        if learns:
            self.learn(clusters)
        return routes, {"routing_commitment": self.commitment(routes.centroids, clusters, valid)} if commits else None

    def _dropout(self, context: Call) -> float:
        """Of each part's weights; where they are wanted, it falls on all of them together instead."""
        return self.dropout if self.training and not self.wants_weights(context) else 0.0

    def _local(
        self, query: Tensor, key: Tensor, value: Tensor, context: Call, added: SelfAttentionTerms | None
    ) -> tuple[Tensor, Tensor | None]:
        """Own block and neighbors; positions count from a row's first real token."""
        dropout = self._dropout(context)
        few = added is not None and query.shape[2] <= FEW_QUERIES and not context.fresh
        if self.wants_weights(context) or context.static or few:

            def reference(scale: float, bias: Tensor | None = None, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
                mask = self._local_mask(context)
                output, weights = literal_softmax_attention(query, key, value, mask, bias, scale, dropout)
                return output.transpose(1, 2), weights

            if added is not None:
                return added.from_matrix(reference, query, key, value, dropout)
            return reference(self.scaling, dropout=dropout)
        place: dict[str, Any] = {
            "key_padding_mask": context.padding_mask,
            "causal": self.is_causal,
            "query_offset": key.shape[2] - query.shape[2],
        }
        if added is not None:
            found = pattern_tiles(self.blocks, *query.shape[1:3], key.shape[2], **place, device=query.device)
            rounds = found[0][1]  # one pattern for all heads
            scaled = query * added.scale
            return tile_attention(scaled, key, value, added.tables, added, rounds, dropout), None
        output: Any = block_sparse_attention(
            query,
            key,
            value,
            self.blocks,
            scale=self.scaling,
            dropout=dropout,
            **place,
        )
        return output, None

    def _local_mask(self, context: Call) -> Tensor:
        """Who reads whom in the local heads, [B or 1, 1, T, S]."""
        padding = context.padding_mask
        lead = context.key_index.new_zeros(1) if padding is None else first_real(padding)
        queries = (context.query_index[None] - lead[:, None])[:, :, None]
        keys = (context.key_index[None] - lead[:, None])[:, None]
        size = self.spec.block_size
        away = keys.div(size, rounding_mode="floor") - queries.div(size, rounding_mode="floor")
        mask = (away >= -1) & (away <= 1) & (queries >= 0)
        if self.is_causal:
            mask = mask & (keys <= queries)
        if padding is not None:
            mask = mask & padding[:, None, :]
        return mask[:, None]

    def _routed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        routes: Routes,
        context: Call,
        cache: Cache | None,
        step: int,
        added: SelfAttentionTerms | None,
    ) -> tuple[Tensor, Tensor | None]:
        literal, dropout = self.wants_weights(context), self._dropout(context)
        if routes.stage_labels is not None:
            labels = labels_of_all(routes.stage_labels, key, cache, step, self.nearest)
            return recent_attention(
                *(query, key, value, labels, self.stages, context),
                literal=literal,
                num_labels=self.clusters,
                own_key_last=False,
                distinct=False,
                scale=self.scaling,
                dropout=dropout,
                added=added,
            )
        (query_index, query_valid), (key_index, key_valid) = (
            cast(Places, routes.query_places),
            cast(Places, routes.key_places),
        )
        options: dict[str, Any] = {"query_valid": query_valid, "key_valid": key_valid, "causal": self.is_causal}
        chosen = (query_index, key_index)
        if added is not None and literal:
            reference = partial(clustered_reference, query, key, value, *chosen, **options)
            return added.from_matrix(reference, query, key, value, dropout)
        if added is not None:
            inputs = (query * added.scale, key, value, added.tables, added)
            return cluster_attention(*inputs, *chosen, **options, dropout=dropout), None
        options.update(scale=self.scaling, dropout=dropout)
        if literal:
            return clustered_reference(query, key, value, *chosen, **options)
        return clustered_attention(query, key, value, *chosen, **options), None


def _normalized_heads(vectors: Tensor) -> Tensor:
    """[`_normalized`] of [B, R, T, d], heads side by side in memory, as they come from a projection."""
    return unit_length(vectors.transpose(1, 2)).transpose(1, 2)


@register("attention", "routing_transformer", aliases=("routing",))
class RoutingSpec(BucketedSpec):
    """
    Args:
        num_clusters: centroids per routed head (`None`: the square root of the text's length, or the length by
            `window_size`).
        window_size: tokens per cluster (`None`: the text's length by the number of clusters).
        num_routing_heads: routed heads of a layer (`None`: half of them).
        first_routing_layer: layers before it are local only.
        block_size: tokens per block of the local heads.
        ema_decay: of the centroids' averages.
        commitment_weight: factor on the auxiliary loss.
        share_qk: keys of routed heads are their queries (`None`: in decoders, where it is needed).
        rotates_routed: whether a rotary position turns the queries and keys of routed heads as well, once their
            clusters are found (in the paper positions are for local heads).
        causal_form: what a decoder reads, `strict` or the `paper`'s form, in which later tokens change which tokens a
            cluster holds; that one cannot generate.
    """

    summary = "local heads, and heads that attend inside k-means clusters"
    unquantized = dict.fromkeys(("attention.q_proj", "attention.k_proj"), "it chooses the cluster of a token")
    later_tokens = "which tokens a cluster holds"
    tensor_parallel = False  # its sums over processes are those of data parallelism

    num_clusters: int | None = bounded(None, "clusters", least=1)
    window_size: int | None = bounded(None, "window", least=1)
    num_routing_heads: int | None = None
    first_routing_layer: int = bounded(0, least=0)
    block_size: int = bounded(256, least=1)
    ema_decay: float | int = bounded(0.999, least=0, below=1)
    commitment_weight: float | int = bounded(1e-4, least=0)
    share_qk: bool | None = None
    rotates_routed: bool = False

    def check(self, config) -> None:
        heads = config.num_attention_heads
        if self.num_routing_heads is not None and not 0 <= self.num_routing_heads <= heads:
            raise ValueError(
                f"routing_transformer needs 0 <= `num_routing_heads` <= {heads} heads, got {self.num_routing_heads}."
            )
        if config.key_value_heads != heads:
            raise ValueError(
                f"routing_transformer clusters each head by itself, so it cannot have {config.key_value_heads}"
                f" key/value heads for {heads} heads; leave `num_key_value_heads` unset."
            )
        if self.rotates_routed and "rotation" not in config.position.acts:
            raise ValueError(
                f"routing_transformer with `rotates_routed=True` has nothing to turn heads by, as position"
                f" {config.position.type!r} rotates nothing; give position 'rotary', or leave it out."
            )
        if not config.is_decoder:
            return
        if self.share_qk is False:
            raise ValueError(
                "routing_transformer in a decoder needs shared queries and keys, or a token would ask in one cluster"
                " and answer in another; leave `share_qk` unset."
            )
        self.check_causal_form(config)

    def shares(self, config) -> bool:
        """Whether routed heads share queries and keys."""
        return config.is_decoder if self.share_qk is None else self.share_qk

    def projects_keys(self, config) -> bool:
        return not self.shares(config)

    def clusters(self, length: int) -> int:
        """Clusters of a text of so many tokens."""
        if self.num_clusters is not None:
            return self.num_clusters
        if self.window_size is not None:
            return max(-(-length // self.window_size), 1)
        return math.isqrt(max(length, 1) - 1) + 1

    def window(self, length: int) -> int:
        """Tokens per cluster of a text of so many."""
        return self.window_size or max(-(-length // self.clusters(length)), 1)

    def most_clusters(self, config) -> int:
        """Clusters of the longest text that positions are made for: there are as many centroids."""
        return self.clusters(config.max_position_embeddings)

    def by_row(self, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """[`clusters`], at most `most`, and [`window`] of texts of `lengths` [B] tokens."""
        if self.num_clusters is not None:
            counts = torch.full_like(lengths, self.num_clusters)
        elif self.window_size is not None:
            counts = (-(-lengths // self.window_size)).clamp(1, most)
        else:
            squares = torch.arange(most, device=lengths.device).square()
            counts = (lengths[:, None] > squares).sum(-1).clamp(min=1)
        if self.window_size is not None:
            return counts, torch.full_like(lengths, self.window_size)
        return counts, (-(-lengths // counts)).clamp(min=1)

    def routed_heads(self, config, layer_idx: int) -> int:
        """Routed heads of a layer."""
        if layer_idx < self.first_routing_layer:
            return 0
        return config.num_attention_heads // 2 if self.num_routing_heads is None else self.num_routing_heads

    def weighs(self, config) -> bool:
        return config.is_decoder  # a token that no cluster chose reads nothing in an encoder

    def build(self, config, **where) -> RoutingAttention:
        return RoutingAttention(config, self, **where)
