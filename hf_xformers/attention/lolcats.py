# SPDX-License-Identifier: Apache-2.0
"""LoLCATs: softmax over a sliding window and linear attention over what came before it, under one normalizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core.cache import SlotStateLayer
from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import wide_products, widened
from ..ops.linear.kernels import inverse_or_zero
from ..ops.linear.window import WindowState, window_linear_attention
from .hedgehog import hedgehog_features
from .shared.learned_features import HeadMap, LearnedFeatures, LearnedFeaturesSpec
from .shared.linear import Decay


class LolcatsAttention(LearnedFeatures):
    """o_i = (sum_{j in W_i} gamma exp(s_ij - c_i) v_j + sum_{j not in W_i} phi_q(q_i) phi_k(k_j) v_j) / (the same sums
    without v_j), s_ij = scale q_i k_j.

    Zhang et al. 2024 (arXiv 2410.10254), section 3.3.1, eqs. 6-7: W_i are the `window` last tokens up to i (in an
    encoder, which the paper has none of, those nearer than `window` on either side), c_i the largest score in W_i, phi
    Hedgehog's features ([`hedgehog`](hedgehog.py)), and gamma in (0, 1) the mixing factor, learned for each head. As
    long as a text fits into the window, this is softmax attention.

    With `sinks` the first real tokens belong to every W_i (Xiao et al. 2023, arXiv 2309.17453): a trained softmax puts
    weight there that features do not imitate. With `affine`, an option of the authors' code, the second sums have the
    factor 1 - gamma, so that a gamma near 1 starts a swap as a window, to which training adds the rest.

    A whole text takes time O(T (window + F) d) per head, and memory O(T). State: keys and values of the last
    `window - 1` tokens and of the sinks, and sum phi(k) v^T and sum phi(k) of those between. The window slides over
    the places of a row, padding included. `attention_probs_dropout_prob` has no effect.
    """

    spec: LolcatsSpec
    state_type = WindowState

    def __init__(self, config, spec: LolcatsSpec, **where):
        super().__init__(config, spec, **where)
        self.query_map = HeadMap(self.num_heads, self.head_dim, self.head_dim)
        self.key_map = HeadMap(self.num_heads, self.head_dim, self.head_dim)
        self.mixing = nn.Parameter(torch.empty(self.num_heads))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.constant_(self.mixing, math.log(self.spec.gamma / (1 - self.spec.gamma)))

    @property
    def gamma(self) -> Tensor:
        """[H], the mixing factors."""
        return torch.sigmoid(self.mixing)

    def repeated(self, x: Tensor) -> Tensor:
        """[B, K, S, d] as it is: heads that share keys share a window."""
        return x

    def phi(self, x: Tensor, *params: Tensor) -> Tensor:
        return hedgehog_features(x, *self.key_map.tensors())

    def query_features(self, x: Tensor) -> Tensor:
        return hedgehog_features(x, *self.query_map.tensors())

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        context: Call,
        state: WindowState | None,
        rotation: Callable[[Tensor], Tensor] | None,
        decay: Decay | None = None,
        remember: bool = False,
    ) -> tuple[Tensor, WindowState | None]:
        output, end = window_linear_attention(
            *(query, key, value, self.query_features, self.phi, self.gamma),
            window=self.spec.window,
            causal=self.is_causal,
            scale=self.scaling,
            key_padding_mask=mask,
            state=state,
            chunk_size=self.chunk_size,
            sinks=self.spec.sinks,
            linear_weight=torch.sigmoid(-self.mixing) if self.spec.affine else None,
        )
        return output.to(value.dtype), end

    def _literal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        context: Call,
        rotation: Callable[[Tensor], Tensor] | None,
        decay: Decay | None = None,
    ) -> tuple[Tensor, Tensor]:
        key, value = super().repeated(key), super().repeated(value)
        query, key = widened(query)[0], widened(key)[0]
        scores = wide_products(query, key) * self.scaling
        products = wide_products(self.query_features(query), self.phi(key))
        place = torch.arange(scores.shape[-1], device=scores.device)
        near = (place[:, None] - place).abs() < self.spec.window
        if self.spec.sinks:
            mask = context.query_padding_mask
            real = torch.ones_like(place, dtype=torch.bool)[None] if mask is None else mask
            near = near | (real & (real.long().cumsum(-1) <= self.spec.sinks))[:, None, None]
        if self.spec.affine:
            products = products * torch.sigmoid(-self.mixing).to(scores.dtype)[:, None, None]
        visible = torch.ones_like(near) if visible is None else visible
        scores = scores.masked_fill(~(near & visible), -torch.inf)
        top = scores.amax(-1, keepdim=True)
        window = self.gamma.to(scores.dtype)[:, None, None] * (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
        weights = window + products.masked_fill(near | ~visible, 0.0)
        weights = weights * inverse_or_zero(weights.sum(-1, keepdim=True))
        return wide_products(weights, value.mT).to(value.dtype), weights.to(value.dtype)


@register("attention", "lolcats", aliases=("hybrid_linear",))
class LolcatsSpec(LearnedFeaturesSpec):
    """
    Args:
        window: tokens that are read with a softmax, the query's own included.
        gamma: weight of the window at the start, between 0 and 1.
        affine: whether what lies beyond the window has the weight 1 - gamma in place of 1.
        sinks: how many first tokens of a text belong to every window.
        scale: factor on the window's scores (None: 1 / sqrt(head width)).
        chunk_size: least number of tokens in a chunk of a whole text.
    """

    summary = "softmax in a sliding window, learned linear attention beyond it: linear time, a state of constant size"
    citation = """@misc{zhang2024lolcats,
  title={{LoLCATs}: On Low-Rank Linearizing of Large Language Models},
  author={Zhang, Michael and Arora, Simran and Chalamala, Rahul and Wu, Alan and Spector, Benjamin and
          Singhal, Aaryan and Ramesh, Krithik and R{\\'e}, Christopher},
  year={2024},
  eprint={2410.10254},
  archivePrefix={arXiv}
}"""
    cross = False

    window: int = bounded(64, "window_size", least=1)
    gamma: float = bounded(0.5, above=0, below=1)
    affine: bool = False
    sinks: int = bounded(0, least=0)
    chunk_size: int = 64

    def cache_layer(self, config, layer_idx: int = 0) -> SlotStateLayer:
        return SlotStateLayer()

    def build(self, config, **where) -> LolcatsAttention:
        return LolcatsAttention(config, self, **where)
