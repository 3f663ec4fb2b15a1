# SPDX-License-Identifier: Apache-2.0
"""Set Transformer: tokens read a few inducing points, which have read the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .shared.base import Attention
from .shared.multihead_block import MultiheadBlock, masked_attention
from .shared.spec import AttentionSpec


class SetTransformerAttention(Attention):
    """ISAB_m(X) = MAB(X, MAB(I, X)) with m learned inducing points I (Lee et al. 2019, arXiv 1810.00825, section 3.1).

    MAB(I, X), a residual, two norms and a row-wise map of its own included, happens in here; of the outer MAB, LN(H +
    rFF(H)) with H = LN(X + Multihead(X, Y, Y)), this is Multihead, and the rest a layer with its norm after the sum
    (`post_ln`) and its feed-forward. The outer `scale` is a field like everywhere.

    Without positions, outputs follow the order of tokens and know nothing else of it: a set. Time O(T m D), memory O(T
    (D + H m)). The weights given out are products of the two attentions, which sum to 1 over tokens.
    """

    spec: SetTransformerSpec

    def __init__(self, config, spec: SetTransformerSpec, **where):
        super().__init__(config, spec, **where)
        self.inducing_points = nn.Parameter(torch.empty(spec.num_inducing, config.hidden_size))
        self.inducing_block = MultiheadBlock(config, bias=spec.bias, norm=spec.inducing_norm)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.xavier_uniform_(self.inducing_points)

    def induce(self, hidden_states: Tensor, mask: Tensor | None, literal: bool) -> tuple[Tensor, Tensor | None]:
        """MAB(I, X), [B, m, D], and the weights of its attention."""
        return self.inducing_block(self.inducing_points, hidden_states, mask, literal)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        literal, mask = self.wants_weights(context), context.padding_mask
        induced, packing = self.induce(hidden_states, mask, literal)
        query, key, value = self.queries(hidden_states), self.keys(induced), self.heads(self.v_proj(induced))
        output, reading = masked_attention(query, key, value, None, self.scaling, self.dropout_now, literal)
        if mask is not None:  # inducing points that have read nothing are something all the same
            output = output.masked_fill(~mask.any(-1)[:, None, None, None], 0.0)
        weights = None if reading is None or packing is None else reading @ packing
        return SublayerOutput(self.o_proj(output.flatten(2)), weights)


@register("attention", "set_transformer", aliases=("isab",))
class SetTransformerSpec(AttentionSpec):
    """num_inducing: inducing points m. inducing_norm: whether the block that makes them has its two layer norms (the
    authors' code leaves them out by default)."""

    summary = "tokens read a few learned points that have read all tokens: linear time"
    acts = frozenset()
    head_options = frozenset({"norm"})
    why_not: ClassVar[Mapping[str, str]] = {"causal": "its inducing points read all tokens, later ones too."}

    num_inducing: int = bounded(32, "num_inducing_points", least=1)
    inducing_norm: bool = True

    def build(self, config, **where) -> SetTransformerAttention:
        return SetTransformerAttention(config, self, **where)
