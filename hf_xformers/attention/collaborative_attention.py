# SPDX-License-Identifier: Apache-2.0
"""Collaborative attention: heads share projections of queries and keys, and mix their channels."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, self_attention_cache
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..ops.common.products import wide_products
from .shared.base import cross_cache, given_memory
from .shared.block_scores import BlockScoresAttention, ScoreBlock
from .shared.spec import AttentionSpec


class CollaborativeAttention(BlockScoresAttention):
    """s^h_ij = scale * ((x_i Wq * m_h) (y_j Wk)^T + (y_j C)_h), with Wq and Wk [D, K] for all heads together.

    Cordonnier, Loukas, Jaggi 2020 (arXiv 2006.16362), eqs. 6 and 9. m [heads, K] mixes the channels of K for each
    head; with K = heads * d and a one in the d channels of head h alone it is multi-head attention, whose biases of
    queries are the content bias C (those of keys cancel in the softmax). Values and output are those of each head.

    Time O(T S heads K): heads times that of multi-head attention where K is as wide. Parameters of queries and keys: 2
    D K + heads (K + D). State: K + heads numbers of keys, which all heads share, and the values.
    """

    unpads = True

    spec: CollaborativeSpec

    def __init__(self, config, spec: CollaborativeSpec, **where):
        super().__init__(config, spec, **where)
        width, self.shared_width = config.hidden_size, spec.width(config)
        if spec.scale is None and spec.scale_of == "shared":
            self.scaling = (self.shared_width / self.num_heads) ** -0.5
        self.q_proj = nn.Linear(width, self.shared_width, bias=False)
        self.k_proj = nn.Linear(width, self.shared_width, bias=False)
        self.content_proj = nn.Linear(width, self.num_heads, bias=False) if spec.content_bias else None
        self.mixing = nn.Parameter(torch.empty(self.num_heads, self.shared_width))

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.q_proj, self.k_proj, self.v_proj), output=self.o_proj)
        if self.spec.start == "normal":
            init.normal_(self.mixing, mean=0.0, std=0.2)
        elif self.spec.start == "ones":
            init.ones_(self.mixing)
        else:
            init.copy_(self.mixing, apart(self.num_heads, self.shared_width).to(self.mixing))

    def project_self(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = self._mixed(context.padded(self.q_proj(hidden_states)))
        key, value = (context.padded(x) for x in self._keys_and_values(hidden_states))
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            key, value = (x[:, 0] for x in appended(cache, key[:, None], value[:, None], step))
        return query, key[:, None], self.heads(value)

    def project_cross(
        self, hidden_states: Tensor, memory: Tensor | None, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, cache = self._mixed(self.q_proj(hidden_states)), cross_cache(past_key_values)
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return query, layer.keys, self.heads(layer.values[:, 0])
        key, value = (x[:, None] for x in self._keys_and_values(given_memory(memory)))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, step)
            cache.is_updated[step] = True
        return query, key, self.heads(value[:, 0])

    def _mixed(self, projected: Tensor) -> Tensor:
        """[B, T, K] -> queries of each head [B, H, T, K]."""
        return projected[:, None] * self.mixing[:, None].to(projected.dtype)

    def _keys_and_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> keys for all heads, with their content biases behind them, [B, S, K + heads], and values [B, S,
        H * d]: all heads side by side, as some caches want one number of heads."""
        key = self.k_proj(tokens)
        if self.content_proj is not None:
            key = torch.cat((key, self.content_proj(tokens)), dim=-1)
        return key, self.v_proj(tokens)

    def scores(self, query: Tensor, key: Tensor, block: ScoreBlock) -> Tensor:
        shared, content = key[:, 0, :, : self.shared_width], key[:, 0, :, self.shared_width :]
        # All heads at once against the keys that they share.
        products = wide_products(query.flatten(1, 2), shared).unflatten(1, query.shape[1:3])
        if self.content_proj is not None:
            products = products + content[..., block.heads].mT[:, :, None].to(products.dtype)
        return products * self.scaling


def apart(heads: int, width: int) -> Tensor:
    """The mixing [heads, width] under which each head has channels of its own."""
    return torch.eye(heads).repeat_interleave(width // heads, dim=1)


@register("attention", "collaborative_attention", aliases=("collaborative",))
class CollaborativeSpec(AttentionSpec):
    """
    Args:
        shared_width: K, channels of queries and keys that all heads share (`None`: as many as all heads of multi-head
            attention have together).
        content_bias: whether each head scores keys by themselves as well.
        start: of the mixing; `apart` gives every head channels of its own, which is multi-head attention, `ones` all
            channels to all, `normal` is N(0, 0.2).
        scale_of: the default scale 1 / sqrt(width) is that of a `head`, which conversions need, or of the `shared`
            width by heads, as in the released code.
    """

    summary = "heads share queries and keys and mix their channels"
    cross = True
    acts = frozenset({"score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})
    head_options = frozenset({"blocks", "parts"})

    shared_width: int | None = bounded(None, least=1)
    content_bias: bool = True
    start: Literal["apart", "ones", "normal"] = "apart"
    scale_of: Literal["head", "shared"] = "head"

    def width(self, config) -> int:
        """K for this config."""
        return config.num_attention_heads * config.head_width if self.shared_width is None else self.shared_width

    def projects_keys(self, config) -> bool:
        return False

    def check(self, config) -> None:
        heads = config.num_attention_heads
        if config.key_value_heads != heads:
            raise ValueError(
                f"collaborative_attention shares keys among all heads and has values for each, so it cannot have"
                f" {config.key_value_heads} key/value heads for {heads} heads; leave `num_key_value_heads` unset."
            )
        if self.start == "apart" and self.width(config) % heads:
            raise ValueError(
                f"collaborative_attention with `start='apart'` divides `shared_width` {self.width(config)} among"
                f" {heads} heads, which does not go out even; change it, or take another `start`."
            )

    def build(self, config, **where) -> CollaborativeAttention:
        return CollaborativeAttention(config, self, **where)
