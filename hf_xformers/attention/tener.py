# SPDX-License-Identifier: Apache-2.0
"""TENER's attention: scores that know direction as well as distance, unscaled, with the tokens themselves as keys."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..core.segment_memory import SegmentCacheLayer
from .shared.spec import AttentionSpec
from .transformer_xl import TransformerXLAttention


class TenerAttention(TransformerXLAttention):
    """score_ts = q_t k_s + q_t R_{t-s} + u k_s + v R_{t-s} (Yan et al. 2019, arXiv 1911.04474, section 3.2).

    R_r = [sin(c_i r) | cos(c_i r)], c_i = 10000^(-2i/d), of the signed distance r = t - s and the width d of a head:
    sin(-x) = -sin(x), so that a token before and one after have different scores, and no matrix W_R mixes the two.
    Scores are not divided by sqrt(d), which makes attention sharper. Keys are the tokens' own states, divided among
    the heads, and heads stand side by side without a further projection. u and v [H, d] are learned in every layer.

    It is Transformer-XL's attention with W_R = 1 and 2 D^2 parameters in place of 5 D^2; cost and state are the same.
    """

    spec: TenerSpec  # type: ignore[assignment]

    def __init__(self, config, spec: TenerSpec, **where):
        super().__init__(config, spec, **where)  # type: ignore[arg-type]
        self.r_proj = None  # type: ignore[assignment]
        self.table_width, self.table_dropout = self.head_dim, 0.0
        if not spec.key_projection:
            self.k_proj = None  # type: ignore[assignment]
        if not spec.output_projection:
            self.o_proj = None  # type: ignore[assignment]

    def initialize(self, config, init) -> None:
        inputs = [projection for projection in (self.q_proj, self.k_proj, self.v_proj) if projection is not None]
        start_projections(config, init, inputs=inputs, output=self.o_proj)
        for bias in (self.content_bias, self.position_bias):
            init.normal_(bias, mean=0.0, std=config.initializer_range)

    def keys(self, hidden_states: Tensor) -> Tensor:
        """[B, S, D] -> [B, H, S, d]: the states themselves, unless `key_projection` is on."""
        return self.heads(hidden_states if self.k_proj is None else self.k_proj(hidden_states))

    def by_head(self, table: Tensor) -> Tensor:
        """R [n, d] -> [H, d, n]: all heads have the same sinusoids."""
        return table.mT.expand(self.num_heads, -1, -1)


@register("attention", "tener")
class TenerSpec(AttentionSpec):
    """
    Args:
        key_projection: keys are projected, as elsewhere.
        output_projection: heads are mixed by a projection, as elsewhere.
        clamp: distances (tokens) beyond which all count as this one.
        reach: how far to either side a query sees, in tokens.
        scale: 1 as published; 1 / sqrt(head width) makes attention smoother.
    """

    summary = "direction-aware unscaled scores, with the tokens themselves as keys"
    acts = frozenset()
    supports = frozenset({"packed_rows"})
    knows_order = True
    share_biases: ClassVar[bool] = False
    segments: ClassVar[bool] = False
    joint_type: ClassVar[None] = None
    distances: ClassVar[str] = "sinusoid"

    bias: bool = False
    scale: float | int | None = 1.0
    key_projection: bool = False
    output_projection: bool = False
    clamp: int | None = bounded(None, least=0)
    reach: int | None = bounded(None, least=0)

    def check(self, config) -> None:
        if config.head_width % 2:
            raise ValueError(f"tener's sinusoids need heads of even width, got {config.head_width}; set `head_dim`.")
        width, joined = config.hidden_size, config.num_attention_heads * config.head_width
        if not (self.key_projection and self.output_projection) and width != joined:
            raise ValueError(
                f"tener divides states of width {width} among heads of together {joined}; leave out `head_dim`, or set"
                " `key_projection=True` and `output_projection=True`."
            )
        if not self.key_projection and config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"tener's keys are the states, of which {config.key_value_heads} `num_key_value_heads` would need"
                " fewer; set `key_projection=True`."
            )

    def projects_keys(self, config) -> bool:
        return self.key_projection

    def types_of(self, config) -> int:
        """Types of keys that are told apart: none."""
        return 0

    def cache_layer(self, config, layer_idx: int = 0) -> SegmentCacheLayer:
        """Room for all tokens."""
        return SegmentCacheLayer(config.stack.cache_slots(config))

    def build(self, config, **where) -> TenerAttention:
        return TenerAttention(config, self, **where)
