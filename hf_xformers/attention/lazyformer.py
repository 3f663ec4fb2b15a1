# SPDX-License-Identifier: Apache-2.0
"""LazyFormer: one attention map for several layers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..core.prepared import Carry, one_state
from ..core.visibility import visible_pairs
from ..ops.common.products import wide_products
from .dense import DenseAttention
from .shared.base import cross_cache, given_memory
from .shared.score_chain import Link, ScoreChain
from .shared.spec import AttentionSpec
from .shared.unread_input import check_unread_input, reads_memory

# Pairs of tokens up to which a map is kept for the layers that share it: 4 MiB for each head in float32.
PAIRS_AT_ONCE = 1 << 20


class LazyFormerAttention(ScoreChain, DenseAttention):
    """The first layer of a lazy block: A = softmax(scale * q k^T + b), o = A v; its other layers: o' = A v' with the
    same A.

    Ying, Ke, He and Liu 2021 (arXiv 2102.12702), section 3. Layers stand in blocks of `block_size`; all but the first
    of a block have neither queries nor keys, 2 D^2 parameters less, and make values and outputs alone. What is shared
    are the weights after softmax and dropout, with mask and position bias in them.

    A block passes on its weights [B, H, T, S], which saves all products Q K^T but the first, or, for longer texts, its
    queries and keys, from which fused attention makes the same weights again in every layer: O(T) memory, and only the
    projections are saved. A map with dropout cannot be made again, so in training with
    `attention_probs_dropout_prob` above 0 the weights are passed on at every length. State: keys of the first layer of
    each block, and values of all.

    Raises:
        ValueError: the layer below passed on no map, or one of another shape.
    """

    spec: LazyFormerSpec
    chain_name = "lazyformer"

    def __init__(self, config, spec: LazyFormerSpec, **where):
        super().__init__(config, spec, **where)
        self.is_first = self.layer_idx in spec.first_layers(config.num_hidden_layers)
        if not self.is_first:
            self.q_proj = self.k_proj = None  # type: ignore[assignment]
            self.q_norm = self.k_norm = None

    def initialize(self, config, init) -> None:
        if self.is_first:
            super().initialize(config, init)
        else:
            start_projections(config, init, inputs=(self.v_proj,), output=self.o_proj)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not self.cross and self._keeps_weights(context, context.query_index.shape[0], context.key_index.shape[0]):
            visible_pairs(context)

    def _keeps_weights(self, context: Call, queries: int, keys: int) -> bool:
        if self.wants_weights(context) or (self.training and self.dropout):
            return True
        if self.spec.hand_on != "auto":
            return self.spec.hand_on == "weights"
        return queries * keys <= PAIRS_AT_ONCE

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
        weights: Tensor | None
        link: Link | None = None
        if self.is_first:
            project = self.project_cross if self.cross else self.project_self
            source: Any = memory if self.cross else context
            query, key, value = project(hidden_states, source, past_key_values, step)
            if self._keeps_weights(context, query.shape[2], key.shape[2]):
                scores = wide_products(query * self.scaling, self.repeated(key))
                output, weights, dropped = self.weigh(scores, self.repeated(value), context)
                link = Link(weights=dropped)
            else:
                link = Link(queries=query, keys=key)
                output, weights = self.attend(query, key, value, context)
        else:
            value = self._values(hidden_states, memory, past_key_values, step)
            output, weights = self._by_map(value, context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        states = None if link is None else one_state(link, self.slot)
        return SublayerOutput(output, weights if self.wants_weights(context) else None, states=states)

    def _values(self, hidden_states: Tensor, memory: Tensor | None, past: Cache | None, step: int) -> Tensor:
        """Values of all tokens [B, K, S, d]. A cache counts its tokens by the keys: one number stands for each."""
        if not self.cross:
            value, own = self.heads(self.v_proj(hidden_states)), self_attention_cache(past)
            return value if own is None else appended(own, value[..., :1], value, step)[1]
        cache = cross_cache(past)
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return layer.values
        value = self.heads(self.v_proj(given_memory(memory)))
        if cache is not None:
            value = cache.cross_attention_cache.update(value[..., :1], value, step)[1]
            cache.is_updated[step] = True
        return value

    def _by_map(self, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """What the first layer of the block passed on, with values [B, K, S, d] of this one -> output [B, T, H, d]."""
        handed = self.handed(context)
        weights, query, key = handed.weights, handed.queries, handed.keys
        if weights is not None:
            value = self.repeated(value)
            self.check_fit("keys", torch.Size((*weights.shape[:2], weights.shape[3])), value.shape[:3])
            return torch.matmul(weights, value).transpose(1, 2), weights
        if query is None or key is None:
            raise ValueError(
                f"lazyformer layer {self.layer_idx} was handed no map, which the first layer of its block makes; give"
                " all layers of the block 'lazyformer'."
            )
        self.check_fit("keys", key.shape[:3], value.shape[:3])
        return self.attend(query, key, value, context)


@register("attention", "lazyformer")
class LazyFormerSpec(AttentionSpec):
    """block_size: layers that share one map (the last block may have fewer). block_sizes: the same for each block, in
    place of it. hand_on: what layers of a block get from the first, its `weights` or its `projections`, which take
    less memory (`auto`: weights up to 1024 tokens)."""

    summary = "several layers share one attention map, and only the first has queries and keys"
    head_options = frozenset({"norm"})
    splits = frozenset({"heads"})
    cross = True
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})

    block_size: int = bounded(2, least=1)
    block_sizes: tuple[int, ...] | None = bounded(None, least=1)
    hand_on: Literal["auto", "weights", "projections"] = "auto"

    def first_layers(self, layers: int) -> set[int]:
        """The first layer of each block of a tower with so many layers."""
        if self.block_sizes is not None:
            return {0, *accumulate(self.block_sizes[:-1])}
        return set(range(0, layers, self.block_size))

    def check(self, config) -> None:
        sizes, layers = self.block_sizes, config.num_hidden_layers
        if sizes is not None and sum(sizes) != layers:
            raise ValueError(
                f"lazyformer has `block_sizes` {list(sizes)} for {sum(sizes)} layers, but the tower has {layers}; make"
                " them add up to that, or give a `block_size`."
            )
        if reads_memory(self, config) and self.carries(config).handed_on:
            what = "lazyformer as `cross_attention` has layers of which each reads the memory with the map of another"
            check_unread_input(config, what)

    def carries(self, config) -> Carry:
        heads = (config.num_attention_heads, config.key_value_heads, config.head_width)
        sizes = (*heads, self.block_size, self.block_sizes, self.hand_on)
        shared = len(self.first_layers(config.num_hidden_layers)) < config.num_hidden_layers
        return Carry(Link, sizes, handed_on=shared, throughout=True)

    def projects_keys(self, config) -> bool:
        return not self.carries(config).handed_on

    def build(self, config, **where) -> LazyFormerAttention:
        return LazyFormerAttention(config, self, **where)
