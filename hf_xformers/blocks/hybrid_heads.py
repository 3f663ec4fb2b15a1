# SPDX-License-Identifier: Apache-2.0
"""Softmax attention and a recurrence side by side in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import SpecLike, bounded, build_spec, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .cache_parts import SeveralAttentionsLayer, StatePartsCacheLayer
from .window_state import check_window_block

NAME = "mixer"


class HybridHeadsLayer(SeveralAttentionsLayer):
    """Attention next to a recurrence that reads the same, then a feed-forward."""

    further = (NAME,)

    def __init__(self, config, block: HybridHeadsBlockSpec, **where):
        super().__init__(config, block, **where)
        self.input_factors = {"attention": block.attention_factors[0], NAME: block.mixer_factors[0]}

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == NAME:
            return config.block.mixer.build(config, layer_idx=layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        factor = self.input_factors.get(entry.name, 1.0)
        entered = entered if factor == 1.0 else entered * factor
        return super().run_entered(entry, entered, context, memory, past_key_values, step)


@register("block", "hybrid_heads", aliases=("parallel_hybrid",))
class HybridHeadsBlockSpec(BlockSpec):
    """x += a' SA(a n) + m' M(m n), n = norm(x); x += f FF(norm(x)): attention and a mechanism whose state decays read
    the same and are added together (Falcon-H1: Zuo et al. 2025, arXiv 2507.22448, section 2; Hymba: Dong et al. 2024,
    arXiv 2411.13676, has a mean of both). A decoder's cross-attention stands before the feed-forward.

    Args:
        mixer: that mechanism, an attention by name or with its fields.
        attention_factors, mixer_factors: what the input and the output of either are multiplied with.
        feedforward_factor: the same for the feed-forward's output.
    """

    supports = frozenset({"packed_rows", "unpadding"})
    mixes: ClassVar[str] = "its second mechanism has a state of all earlier tokens"
    summary = "attention and a recurrence in parallel, added together"

    mixer: SpecLike = "mamba2"
    attention_factors: tuple[float, float] = bounded((1.0, 1.0), above=0)
    mixer_factors: tuple[float, float] = bounded((1.0, 1.0), above=0)
    feedforward_factor: float | int = bounded(1.0, above=0)

    def __post_init__(self) -> None:
        self.mixer = build_spec("attention", self.mixer)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "mixer": self.mixer.to_dict()}

    def check_fields(self) -> None:
        if "mixer" not in self.mixer.supports:
            raise ValueError(
                f"block 'hybrid_heads' has a mechanism whose state decays next to attention, got `mixer`"
                f" {self.mixer.type!r}; use 'mamba2', 'gated_delta_net' or another one of their kind."
            )

    def check(self, config) -> None:
        if not config.is_decoder:
            raise ValueError(
                f"block 'hybrid_heads' with its mixer {self.mixer.type!r} reads a text from its beginning; use it in a"
                " decoder (`is_decoder=True`, or `decoder={'block': ...}`)."
            )
        if not (config.residual.additive and config.residual.shares_input):
            raise ValueError(
                "block 'hybrid_heads' adds two mechanisms with one norm before them to the residual stream, which"
                f" residual {config.residual.type!r} does not do; use 'pre_ln'."
            )
        inside = config.position.acts & {"score_terms", "head_terms"}
        if inside:
            raise ValueError(
                f"position {config.position.type!r} has terms for one attention of each layer, but block"
                " 'hybrid_heads' has two; use 'rotary' or a score bias."
            )
        check_window_block("hybrid_heads", config, "a state")
        self.mixer.check(config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [
            SublayerPlan("attention", "attention", self.attention_factors[1]),
            SublayerPlan(NAME, "attention", self.mixer_factors[1], reads="same_input"),
            *reading,
            SublayerPlan("feedforward", "feedforward", self.feedforward_factor),
        ]

    def cache_layer(self, config) -> StatePartsCacheLayer:
        return StatePartsCacheLayer()

    def build(self, config, **where) -> HybridHeadsLayer:
        return HybridHeadsLayer(config, self, **where)
