# SPDX-License-Identifier: Apache-2.0
"""ETC: long tokens read a band and all global tokens, global tokens read everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput, can_inspect
from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.real_tokens import real_first
from .longformer import LongformerAttention
from .shared.spec import AttentionSpec


class EtcAttention(LongformerAttention):
    """Ainslie et al. 2020 (arXiv 2004.08483), section 2.2: a softmax over {j : |i - j| <= r} and all global tokens for
    a long token i, and over everything for a global one (long to long, long to global, global to long and global to
    global attention). Queries, keys and values have the same projections for both unless `share_qkv_projections` is
    off; outputs have their own unless `share_output_projection` is on.

    Global tokens come as the model input `global_attention_mask` [B, T], or from the stack `etc`. Time and memory
    O(T (r + G) + G^2) for G of them. A graph that is recorded (compiled, exported) has the dense equation, at
    quadratic cost.
    """

    joins_projections = True

    def __init__(self, config, spec: EtcSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)  # type: ignore[arg-type]
        self.global_o_proj: nn.Linear | None = None
        if not spec.share_output_projection:
            self.global_o_proj = nn.Linear(
                self.o_proj.in_features, self.o_proj.out_features, bias=spec.has_output_bias
            )

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.global_o_proj is not None:
            init.copy_(self.global_o_proj.weight, self.o_proj.weight)

    def _literal(self, context: Call, queries: int) -> bool:
        # The plan of tiles is made outside of graphs.
        return super()._literal(context, queries) or not can_inspect()

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
        rows = self._global_rows(hidden_states, context)
        joined, weights = self.attend(query, key, value, context, rows)
        joined = joined.reshape(*hidden_states.shape[:-1], -1)
        output = self.o_proj(joined)
        chosen, most = self.global_tokens(context)
        idle: list[nn.Module] = []
        if self.global_o_proj is not None and chosen is not None:
            count = int(chosen.sum(1).max()) if most is None else most
            index = real_first(chosen.expand(output.shape[0], -1))[:, :count, None]
            taken = chosen.expand(output.shape[0], -1).gather(1, index[..., 0])[..., None]
            own = self.global_o_proj(joined.gather(1, index.expand(-1, -1, joined.shape[-1])))
            known = output.gather(1, index.expand(-1, -1, output.shape[-1]))
            output = output.scatter(1, index.expand_as(own), torch.where(taken, own, known).to(output.dtype))
        elif self.global_o_proj is not None:
            idle.append(self.global_o_proj)
        if self.separate and rows is None:
            idle += [self._own(name) for name in "qkv"]
        if idle and torch.is_grad_enabled():  # distributed training waits for the gradient of every parameter
            output = output + 0.0 * sum(p.sum() for part in idle for p in part.parameters())
        return SublayerOutput(output, weights)


@register("attention", "etc")
class EtcSpec(AttentionSpec):
    """local_radius: r, tokens on each side that a long token reads. share_qkv_projections: long and global tokens are
    projected alike to queries, keys and values. share_output_projection: and so is what they read."""

    summary = "a band for all tokens, and global tokens with output projections of their own"
    why_not: ClassVar[Mapping[str, str]] = {"causal": "its global tokens read the whole text."}
    head_options = frozenset({"norm"})
    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms"})
    inputs: ClassVar[tuple[str, ...]] = ("global_attention_mask", "max_global_tokens")

    local_radius: int = bounded(84, least=1)
    share_qkv_projections: bool = True
    share_output_projection: bool = False

    @property
    def separate_global_projections(self) -> bool:
        return not self.share_qkv_projections

    def pattern(self, config, layer_idx: int) -> Pattern:
        return patterns.band(self.local_radius, self.local_radius)

    def build(self, config, **where) -> Any:
        return EtcAttention(config, self, **where)
