# SPDX-License-Identifier: Apache-2.0
"""The block that a Set Transformer is made of, in attention through inducing points and in pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.call import dropout_rate
from ...core.initialization import start_projections
from ...ops.common.fused import fused_attention
from .base import literal_softmax_attention


class MultiheadBlock(nn.Module):
    """MAB(X, Y) = LN(H + rFF(H)), H = LN(X + Multihead(X, Y, Y)) (Lee et al. 2019, arXiv 1810.00825, section 3.1).

    rFF is one linear map and ReLU, as in the authors' code, which has its residual on the projected X, no output
    projection, scores over the root of the whole width, and by default no LN.
    """

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config, *, bias: bool = True, norm: bool = True):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        inner, self.scaling = self.heads * config.head_width, config.head_width**-0.5
        self.dropout = config.attention_probs_dropout_prob
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=bias) for _ in range(3))
        self.o_proj, self.up_proj = nn.Linear(inner, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2)) if norm else None

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.q_proj, self.k_proj, self.v_proj), output=self.o_proj)

    def forward(
        self, asking: Tensor, read: Tensor, mask: Tensor | None = None, literal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """asking [B, n, D] or, alike for all rows, [n, D], read [B, S, D], mask [B, S] boolean, True = real -> [B, n,
        D] and, if `literal`, the weights [B, H, n, S]. Where nothing is real, attention gives zeros."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for projection, x in ((self.q_proj, asking), (self.k_proj, read), (self.v_proj, read))
        )
        query, dropout = query.expand(read.shape[0], -1, -1, -1), self.dropout if self.training else 0.0
        output, weights = masked_attention(query, key, value, mask, self.scaling, dropout, literal)
        hidden = self._norm(asking + self.o_proj(output.flatten(2)), 0)
        return self._norm(hidden + F.relu(self.up_proj(hidden)), 1), weights

    def _norm(self, x: Tensor, place: int) -> Tensor:
        return x if self.norms is None else self.norms[place](x)


class MultiheadPooling(nn.Module):
    """The mean of SAB(PMA_k(Z)) over its k vectors, with PMA_k(Z) = MAB(S, rFF(Z)) for k learned seeds S and SAB(X) =
    MAB(X, X) (Lee et al. 2019, section 3.2), which one seed needs none of.

    The order of Z does not count. A row of padding alone has what the seeds give by themselves.
    """

    def __init__(self, config, seeds: int = 1):
        super().__init__()
        width = config.hidden_size
        self.up_proj = nn.Linear(config.stack.output_width(config), width)
        self.seeds = nn.Parameter(torch.empty(seeds, width))
        self.block = MultiheadBlock(config)
        self.among_seeds = MultiheadBlock(config) if seeds > 1 else None

    def initialize(self, config, init) -> None:
        init.xavier_uniform_(self.seeds)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D], mask [B, T] boolean or None -> [B, D]."""
        found, _ = self.block(self.seeds, F.relu(self.up_proj(hidden_states)), mask)
        if self.among_seeds is not None:
            found, _ = self.among_seeds(found, found)
        return found.mean(dim=1)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    literal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention with a mask of keys: query [B, H, n, d], key and value [B, K, S, d], mask [B, S] boolean ->
    [B, n, H, d] and, if `literal`, the weights. A row without keys gives zeros."""
    if literal:
        allowed = None if mask is None else mask[:, None, None, :]
        return literal_softmax_attention(query, key, value, allowed, None, scaling, dropout)
    empty = None
    if mask is not None:  # a softmax over nothing is NaN: let an empty row see everything and blank its output
        empty = ~mask.any(-1)
        mask = (mask | empty[:, None])[:, None, None, :]
    grouped = key.shape[1] != query.shape[1]
    output = fused_attention(query, key, value, mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    if empty is not None:
        output = output.masked_fill(empty[:, None, None, None], 0.0)
    return output.transpose(1, 2), None
