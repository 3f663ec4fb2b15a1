# SPDX-License-Identifier: Apache-2.0
"""Poolingformer: a sliding window, and a wider one over pooled keys for what it gives."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.cache import WindowLayer
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, check_layers, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.real_tokens import first_real
from ..ops.pooled_windows import Grouped, pool_windows
from .shared.base import literal_softmax_attention
from .shared.block_sparse import BlockSparseAttention
from .shared.pattern_spec import BlockSparseSpec, window_cache


class PoolingCacheLayer(WindowLayer):
    """Keys and values of the last tokens, for a window, and others of more tokens, from which windows are pooled."""

    is_croppable = False

    def __init__(self, window: int, pooled_window: int):
        super().__init__(sliding_window=window)
        self.pooled = WindowLayer(sliding_window=pooled_window)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "poolingformer's windows cannot bring back what they dropped; decode without an assistant model."
            )

    def reset(self) -> None:
        super().reset()
        self.pooled.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.pooled.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.pooled.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.pooled.batch_select_indices(indices)

    def offload(self) -> None:
        super().offload()
        self.pooled.offload()

    def prefetch(self) -> None:
        super().prefetch()
        self.pooled.prefetch()


class PoolingformerAttention(BlockSparseAttention):
    """o_i = W_o (y_i + z_i): two levels (Zhang, Gong, Shen, Li, Lv, Duan and Chen 2021, arXiv 2105.04371, section 3).

    Level 1: y_i = softmax over {j : |i - j| <= w1} with the projections Q, K, V.
    Level 2, with projections of y of its own: z_i = softmax over pooled keys and values p with |p - floor(i / xi)| <=
    w2 / xi, where p is pooled of the tokens p xi .. p xi + kappa - 1. Pooling (section 3.2): the mean, the maximum, or
    sum_t delta_t v_t with delta = softmax(W_p c), c the window's middle vector and W_p [kappa, d] for each head, one
    for keys and one for values ("LDConv"). So i sees nothing farther than w1 + w2 + kappa - 1 tokens.

    Windows are counted from a text's first real token; of the last ones only real tokens are pooled. A decoder (not in
    the paper) has w1 tokens before i in level 1, and those pooled keys in level 2 whose last token stands before, or
    at, the first one of i's group of xi tokens: the tokens between are in level 1. Positions act in level 1; weights
    given out are its own.

    Time O(T (w1 + w2 / xi) d), memory O(T). State: keys and values of level 1 of w1 tokens, of level 2 of w2 + xi.
    """

    spec: PoolingformerSpec

    joins_projections = True

    def __init__(self, config, spec: PoolingformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        stride = spec.pool_stride
        self.reach = spec.window2 // stride
        self.behind = -(-(spec.pool_kernel - 1) // stride) if self.is_causal else 0
        # A graph that is being recorded cannot make a pattern.
        self.pooled_pattern = patterns.band(self.reach - self.behind, 0 if self.is_causal else self.reach)
        own, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        if not spec.share_projections:
            width = config.hidden_size if spec.level2_input == "hidden" else own
            self.q_pool_proj = nn.Linear(width, own, bias=spec.bias)
            self.k_pool_proj = nn.Linear(width, keys, bias=spec.bias)
            self.v_pool_proj = nn.Linear(width, keys, bias=spec.bias)
        self.key_pool: nn.Parameter | None = None
        self.value_pool: nn.Parameter | None = None
        if spec.pool_type == "ldconv":
            shape = (self.num_key_value_heads, spec.pool_kernel, self.head_dim)
            self.key_pool, self.value_pool = (nn.Parameter(torch.empty(shape)) for _ in range(2))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for pool in (self.key_pool, self.value_pool):
            if pool is not None:
                init.normal_(pool, mean=0.0, std=config.initializer_range)

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
        near, weights = self.attend(query, key, value, context)
        near = near.flatten(2)
        given = hidden_states if self.spec.level2_input == "hidden" else near
        output = near + self._pooled(given, context, past_key_values, step).transpose(1, 2).flatten(2)
        return SublayerOutput(self.o_proj(output), weights)

    def _pooled(self, given: Tensor, context: Call, past_key_values: Cache | None, step: int) -> Tensor:
        """Level 2 of [B, T, width] -> [B, H, T, d]."""
        spec = self.spec
        names = "qkv" if spec.share_projections else ("q_pool", "k_pool", "v_pool")
        query, key, value = (self.heads(getattr(self, f"{name}_proj")(given)) for name in names)
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            layer = cache.layers[step]
            if not isinstance(layer, PoolingCacheLayer):
                raise TypeError(
                    "poolingformer keeps the tokens of two levels, which a"
                    f" {type(cache).__name__} has no place for; leave `past_key_values` out, or make it with"
                    " `hf_xformers.core.cache.make_cache(config)`."
                )
            key, value = layer.pooled.update(key, value)
        total, real = context.key_index.shape[0], context.padding_mask
        lead = None if real is None else first_real(real)
        grouped = Grouped(lead, query.shape[2], key.shape[2], total, spec.pool_stride, query.device)
        held = None if real is None else real[:, total - key.shape[2] :]

        def short(x: Tensor, centre: Tensor | None) -> tuple[Tensor, Tensor]:
            windows, known = grouped.windows(x, held, spec.pool_kernel)
            return pool_windows(windows, known, spec.pool_kernel, spec.pool_stride, spec.pool_type, centre)

        (key, some), (value, _) = short(key, self.key_pool), short(value, self.value_pool)
        mask = (grouped.begun() & some).expand(key.shape[0], -1)
        dropout = self.dropout_now
        query = grouped.group_queries(query)
        if self.wants_weights(context):
            output = self._literal_level(query, key, value, mask, grouped.before, dropout)
        else:
            found: Any = block_sparse_attention(
                query,
                key,
                value,
                self.pooled_pattern,
                key_padding_mask=mask,
                query_offset=grouped.before,
                key_offset=self.behind,
                scale=self.scaling,
                dropout=dropout,
                score_cap=spec.score_cap,
            )
            output = found
        return grouped.ungroup(output)

    def _literal_level(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, before: int, dropout: float
    ) -> Tensor:
        group = before + torch.arange(query.shape[2], device=query.device)[:, None]
        ahead = torch.arange(key.shape[2], device=query.device)[None] - group
        allowed = ((ahead >= -self.reach) & (ahead <= (-self.behind if self.is_causal else self.reach)))[None, None]
        allowed = allowed & mask[:, None, None]
        cap = self.spec.score_cap
        found, _ = literal_softmax_attention(query, key, value, allowed, None, self.scaling, dropout, cap)
        return found.transpose(1, 2)


@register("attention", "poolingformer")
class PoolingformerSpec(BlockSparseSpec):
    """
    Args:
        window1: w1, tokens on each side that level 1 reads.
        window2: w2, tokens on each side from which level 2 has pooled keys.
        pool_kernel: kappa, tokens of a pooled key.
        pool_stride: xi, tokens from one to the next.
        pool_type: how they are pooled.
        two_level_layers: the layers with both levels; others have level 1 alone (`None`: a quarter of the layers, in
            the middle).
        level2_input: what level 2 reads, level 1's output or the layer's input ("mix" in the paper).
        share_projections: level 2 has the projections of level 1.
    """

    supports = frozenset()
    summary = "a sliding window, and a second level of attention over pooled keys of a wider one"
    head_options = frozenset({"cap"})
    keeps_rotated = True  # pooled keys

    window1: int = bounded(128, "window", least=1)
    window2: int = bounded(512, least=1)
    pool_kernel: int = bounded(5, least=1)
    pool_stride: int = bounded(4, least=1)
    pool_type: Literal["ldconv", "mean", "max"] = "ldconv"
    two_level_layers: tuple[int, ...] | None = None
    level2_input: Literal["level1", "hidden"] = "level1"
    share_projections: bool = False

    def check_fields(self) -> None:
        if self.window2 < self.window1:
            raise ValueError(
                f"poolingformer's second level reads farther than its first: `window2` ({self.window2}) must be at"
                f" least `window1` ({self.window1})."
            )
        if self.pool_stride > self.pool_kernel:
            raise ValueError(
                f"poolingformer leaves tokens out with `pool_stride` {self.pool_stride} above `pool_kernel`"
                f" {self.pool_kernel}; take a stride of at most the kernel."
            )

    def check(self, config) -> None:
        if config.is_decoder and self.window2 < self.pool_kernel + self.pool_stride:
            raise ValueError(
                f"In a decoder poolingformer's `window2` ({self.window2}) has no room for a pooled key of"
                f" {self.pool_kernel} tokens before a token's own group of {self.pool_stride}; make it at least"
                f" {self.pool_kernel + self.pool_stride}."
            )
        check_layers(self, config, "two_level_layers")
        if self.share_projections and config.num_attention_heads * config.head_width != config.hidden_size:
            raise ValueError(
                f"poolingformer's `share_projections` needs heads as wide together ({config.num_attention_heads} x"
                f" {config.head_width}) as `hidden_size` ({config.hidden_size}); leave `head_dim` out."
            )

    def has_two_levels(self, config, layer_idx: int) -> bool:
        if self.two_level_layers is not None:
            return layer_idx in self.two_level_layers
        layers = config.num_hidden_layers
        count = -(-layers // 4)
        first = (layers - count + 1) // 2
        return first <= layer_idx < first + count

    def pattern(self, config, layer_idx: int) -> Pattern:
        return patterns.band(self.window1, 0 if config.is_decoder else self.window1)

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        if not self.has_two_levels(config, layer_idx):
            return window_cache(self.window1 + 1)
        return PoolingCacheLayer(max(self.window1 + 1, 2), self.window2 + self.pool_stride)

    def build(self, config, **where) -> BlockSparseAttention:
        two = self.has_two_levels(config, where["layer_idx"])
        return (PoolingformerAttention if two else BlockSparseAttention)(config, self, **where)
