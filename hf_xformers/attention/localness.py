# SPDX-License-Identifier: Apache-2.0
"""Localness modeling: every query predicts a window of the text, which scores outside of it fall away from."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import widened
from ..ops.common.real_tokens import real_places
from ..ops.score_terms.terms import QueryBlock
from ..position.score_terms import SelfAttentionTerms
from .dense import DenseAttention
from .shared.spec import AttentionSpec
from .shared.term_blocks import attend_with_terms, weights_with_terms

# Tokens. A window as narrow as one token would leave no gradient to widen it.
LEAST_STD = 0.5


class LocalnessAttention(DenseAttention):
    """o_i = sum_j softmax_j(scale * q_i k_j - (j - P_i)^2 / (2 s_i^2)) v_j,   s_i = D_i / 2.

    Yang, Tu, Wong, Meng, Chao and Zhang 2018 (arXiv 1810.10182), section 3. P_i = I sigmoid(u_P tanh(q_i W)) is the
    center, j and P_i count a text's tokens from 1 on, I is their number. D_i is the width of the window:

    - query: D_i = I sigmoid(u_D tanh(q_i W)), with the W of the center (eq. 9);
    - layer: D = I sigmoid(u_D tanh(k W')) with k the mean of all keys of the head (eq. 8);
    - fixed: D = `fixed_window` tokens (eq. 7).

    W and W' [d, d] are shared by heads unless `share_heads` is off; each head has a u_P and a u_D. In a decoder I is
    the number of tokens up to i, since the length of a text is not known while it is written; in cross-attention it is
    that of the memory. I counts real tokens, so that padding moves no window, and s is at least half a token. The
    first `layers` layers have windows, the others are dense. Time O(T^2 D); scores are made for a block of queries at
    a time, memory O(T). State: keys and values of all tokens seen.
    """

    spec: LocalnessSpec

    undecayed = ("centre", "width")

    def __init__(self, config, spec: LocalnessSpec, **where):
        super().__init__(config, spec, **where)
        self.is_local = self.layer_idx < spec.local_layers(config)
        if not self.is_local:
            return
        heads, d = self.num_heads, self.head_dim
        self.predictor = nn.Parameter(torch.empty(1 if spec.share_heads else heads, d, d))
        self.centre = nn.Parameter(torch.empty(heads, d))
        self.width = None if spec.window == "fixed" else nn.Parameter(torch.empty(heads, d))
        self.width_predictor = nn.Parameter(torch.empty_like(self.predictor)) if spec.window == "layer" else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.is_local:
            bound = math.sqrt(3 / self.head_dim)  # Glorot's for each matrix
            for matrix in (self.predictor, self.width_predictor):
                if matrix is not None:
                    init.uniform_(matrix, -bound, bound)
            for vector in (self.centre, self.width):
                if vector is not None:
                    init.normal_(vector, mean=0.0, std=config.initializer_range)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        if not self.is_local:
            return super().attend(query, key, value, context)
        terms = self._terms(query, key, context)
        inputs = (query * self.scaling, self.repeated(key), self.repeated(value), terms, self.dropout_now)
        return weights_with_terms(*inputs) if self.wants_weights(context) else (attend_with_terms(*inputs), None)

    def _terms(self, query: Tensor, key: Tensor, context: Call) -> LocalnessTerms:
        """The windows of the queries [B, H, T, d], as terms of their scores."""
        places, counts, real = self._places(context, key.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            asks, first, centre = widened(query, self.predictor, self.centre)
            hidden = torch.tanh(asks @ first)  # [B, H, T, d]
            length = counts.to(asks.dtype)[:, None]  # [B or 1, 1, T]
            centres = length * torch.sigmoid((hidden * centre[:, None]).sum(-1))
            width = length.new_full((), float(self.spec.fixed_window))
            if self.width is not None and self.width_predictor is not None:
                keys, second, vector = widened(self.repeated(key), self.width_predictor, self.width)
                mean = _masked_mean(keys, real)[:, :, None]
                width = length * torch.sigmoid((torch.tanh(mean @ second) * vector[:, None]).sum(-1))
            elif self.width is not None:
                width = length * torch.sigmoid((hidden * widened(self.width)[0][:, None]).sum(-1))
            sharpness = 0.5 / (width / 2).clamp(min=LEAST_STD).square()
            windows = torch.stack((centres, sharpness.expand_as(centres)), dim=-1)  # [B, H, T, 2]
        terms = LocalnessTerms(self.scaling, (windows.transpose(0, 1),), context, key.shape[2])
        terms.cross, terms.places = self.cross, places
        return terms

    def _places(self, context: Call, num_keys: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Places of keys from 1 on [B or 1, S], the number of tokens that a query's window is a part of [B or 1, T],
        and which keys are real [B, S]."""
        if self.cross:
            real, own = context.memory_padding_mask, torch.arange(num_keys, device=context.query_index.device)[None]
        else:
            real, own = context.padding_mask, context.key_index[None]
        places = (own if real is None else real_places(real)) + 1
        if self.cross or not context.causal:
            total = places[:, -1:]  # padding behind the last token counts as that
            return places, total.expand(-1, context.query_index.shape[0]), real
        return places, places[:, context.query_index], real


def _masked_mean(keys: Tensor, real: Tensor | None) -> Tensor:
    """keys [B, H, S, d] -> the mean over real tokens, [B, H, d]"""
    if real is None:
        return keys.mean(2)
    share = real.to(keys.dtype) / real.sum(-1, keepdim=True).clamp(min=1)
    return (keys * share[:, None, :, None]).sum(2)


class LocalnessTerms(SelfAttentionTerms):
    """-(j - P_i)^2 c_i. The only table has P and c of the queries, [H, B, T, 2]; places [B or 1, S]: j of the keys."""

    places: Tensor

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (tables[0].transpose(0, 1),)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        centres, sharpness = block.by_query[0].split(1, dim=-1)
        away = self.places[:, None, None, : block.keys].to(centres.dtype) - centres
        return -(away.square() * sharpness)


@register("attention", "localness")
class LocalnessSpec(AttentionSpec):
    """
    Args:
        window: whether each `query`, each `layer` for all its queries, or nobody (`fixed`) chooses the width of the
            windows.
        fixed_window: their width in tokens, where it is fixed.
        layers: how many layers have windows, from the first one on (`None`: half of them, rounded up); the others are
            dense.
        share_heads: one matrix for the windows of all heads.
    """

    summary = "every query predicts a window of the text, which scores outside of it fall away from"
    head_options = frozenset({"norm"})
    cross = True

    window: Literal["query", "layer", "fixed"] = "query"
    fixed_window: float | int = bounded(10.0, above=0)
    layers: int | None = None
    share_heads: bool = True

    def local_layers(self, config) -> int:
        return -(-config.num_hidden_layers // 2) if self.layers is None else self.layers

    def check_fields(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ValueError(
                f"localness needs `layers` >= 1, got {self.layers}; for no windows at all use attention 'dense'."
            )

    def check(self, config) -> None:
        if self.window == "layer" and config.is_decoder and config.attention is self:
            raise ValueError(
                "localness with `window='layer'` takes the width of its windows from the mean of all keys, later ones"
                " among them, so it cannot stand in a decoder; use `window='query'` or `window='fixed'`."
            )

    def build(self, config, **where) -> LocalnessAttention:
        return LocalnessAttention(config, self, **where)
