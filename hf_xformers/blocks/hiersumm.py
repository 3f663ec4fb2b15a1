# SPDX-License-Identifier: Apache-2.0
"""HierSumm's layers: those below read a paragraph, the last ones add what the other paragraphs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput, dropout_rate
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import Prepared
from ..ops.common.products import wide_products
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .nesting import Nesting


class Paragraphs(Prepared):
    """What layers over paragraphs are told of a call: where the words of B texts stand, and the weights [B, P, P] of a
    given graph of the paragraphs, or None."""

    nesting: Nesting
    graph: Tensor | None


class InterParagraphAttention(Sublayer):
    """Liu and Lapata 2019 (arXiv 1905.13164), section 3.3. For head z of paragraph p, with words x_1 .. x_W:

    a = softmax_i(x_i W_a)_z,   h_p = LN(sum_i a_i (x_i W_b)_z),
    c_pz = sum_q softmax_q(Q h_p . K h_q / sqrt(d)) V h_q

    and every word of p is given c_p = [c_p1 .. c_pH] W_c. Q, K, V [d, d] and the norm are shared by the heads, as in
    the authors' code (nlpyang/hiersumm; the paper writes them by head). In the first `graph_heads` heads the weights
    of a given graph, normalized over the paragraphs, stand in place of the softmax (section 3.4).

    `weight_proj`, `content_proj` and `o_proj` are W_a, W_b and W_c. Pooling weights are sums over real words, in
    float32. Cost O(T D^2 + P^2 D) for P paragraphs.
    """

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config, graph_heads: int):
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.graph_heads = width // self.num_heads, graph_heads
        self.dropout = config.attention_probs_dropout_prob
        self.weight_proj = nn.Linear(width, self.num_heads)
        self.content_proj = nn.Linear(width, width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(self.head_dim, self.head_dim) for _ in range(3))
        self.head_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
        self.o_proj = nn.Linear(width, width)

    def pooling_weights(self, words: Tensor, real: Tensor) -> Tensor:
        """words [R, W, D], real [R, W] -> [R, W, H], which sum to 1 over real words; zeros where there are none."""
        scores = self.weight_proj(words)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        real = real.unsqueeze(-1)
        weights = torch.softmax(wide.masked_fill(~real, torch.finfo(wide.dtype).min), dim=1)
        return weights.masked_fill(~real, 0.0).to(words.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        """hidden_states [B * P, W, D] -> [B * P, W, D], the same for all words of a paragraph."""
        told = context.prepared(Paragraphs)
        nesting, (rows, width, _) = told.nesting, hidden_states.shape
        weights = self.pooling_weights(hidden_states, nesting.words.flatten(0, 1))
        content = self.content_proj(hidden_states).view(rows, width, self.num_heads, self.head_dim)
        heads = self.head_norm(torch.einsum("rwh,rwhd->rhd", weights, content))
        heads = heads.unflatten(0, nesting.words.shape[:2]).transpose(1, 2)  # [B, H, P, d]
        real = nesting.filled[:, None, None, :]
        query, key, value = self.q_proj(heads), self.k_proj(heads), self.v_proj(heads)
        # P is small: the literal equation is the path of every implementation.
        shares = self.shares(wide_products(query, key) * self.head_dim**-0.5, real)
        if self.graph_heads and told.graph is not None:
            given = self.shares_of_graph(told.graph, real).expand(-1, self.graph_heads, -1, -1)
            shares = torch.cat([given.to(shares.dtype), shares[:, self.graph_heads :]], dim=1)
        shares = nn.functional.dropout(shares.to(value.dtype), self.dropout, self.training)
        output = (shares @ value).transpose(1, 2).flatten(2)
        written = self.o_proj(output).view(rows, 1, -1)
        return SublayerOutput(written.expand(-1, width, -1))

    @staticmethod
    def shares(scores: Tensor, real: Tensor) -> Tensor:
        """scores [B, H, P, P], real [B, 1, 1, P] -> softmax over real paragraphs; zeros where there are none."""
        scores = scores.masked_fill(~real, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1).masked_fill(~real, 0.0)

    @staticmethod
    def shares_of_graph(graph: Tensor, real: Tensor) -> Tensor:
        """graph [B, P, P] of weights >= 0, real [B, 1, 1, P] -> [B, 1, P, P] that sum to 1 over real paragraphs, or
        are zeros for a paragraph that has no neighbor."""
        wide = graph if graph.dtype == torch.float64 else graph.float()
        wide = wide.unsqueeze(1).masked_fill(~real, 0.0)
        return wide / wide.sum(-1, keepdim=True).clamp(min=1e-12)


class HierSummLayer(XFormerLayer):
    """A layer whose attention reads a paragraph's words, or (`global_attention`) the other paragraphs."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "global_attention":
            return InterParagraphAttention(config, config.block.graph_heads)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "hiersumm")
class HierSummBlockSpec(BlockSpec):
    """global_layers: how many of the layers, the last ones, read the other paragraphs. graph_heads: heads of these
    whose weights are those of the input `paragraph_graph` [B, P, P], where it is given."""

    passes_states: ClassVar[bool] = False
    reads: ClassVar[frozenset[HandOver]] = frozenset({HandOver.PARAGRAPHS})
    supports = frozenset()
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "its paragraphs are rows"}

    summary = "layers over a paragraph's words, then layers that read the other paragraphs"

    global_layers: int = bounded(2, least=0)
    graph_heads: int = bounded(0, least=0)

    def check(self, config) -> None:
        if self.graph_heads > config.num_attention_heads:
            raise ValueError(
                f"hiersumm has {config.num_attention_heads} heads (`num_attention_heads`), fewer than the"
                f" `graph_heads` {self.graph_heads}; take at most as many."
            )
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"block 'hiersumm' divides `hidden_size` {config.hidden_size} among its heads, and"
                f" {config.num_attention_heads} (`num_attention_heads`) is no divisor of it; take one that is."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reads_others = layer_idx >= config.num_hidden_layers - self.global_layers
        name = "global_attention" if reads_others else "attention"
        return [SublayerPlan(name, "attention"), SublayerPlan("feedforward", "feedforward")]

    def build(self, config, **where) -> HierSummLayer:
        return HierSummLayer(config, self, **where)
