# SPDX-License-Identifier: Apache-2.0
"""Mask attention network: dynamic mask attention, attention, feed-forward."""

from __future__ import annotations

from typing import ClassVar

from ..core.components import bounded, build_spec, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .cache_parts import PartsCacheLayer, SeveralAttentionsLayer
from .window_state import check_window_block

NAME = "dynamic_mask"


class MaskAttentionNetworkLayer(SeveralAttentionsLayer):
    """Dynamic mask attention, then a vanilla layer."""

    further = (NAME,)

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == NAME:
            spec = {"type": "dynamic_mask", "max_distance": config.block.max_distance, "relu": config.block.relu}
            return build_spec("attention", spec).build(config, layer_idx=layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "mask_attention_network", aliases=("man",))
class MaskAttentionNetworkBlockSpec(BlockSpec):
    """x += DMAN(x); x += SA(x); [x += XA(x)]; x += FF(x) (Fan et al. 2021, arXiv 2103.13597, section 3.3).

    Masks of ones are self-attention, masks that are the identity are a feed-forward sublayer; dynamic masks stand
    between them. The feed-forward is meant to be half as wide as usual, which pays for them.

    max_distance, relu: of the dynamic mask attention (`dynamic_mask`).
    """

    supports = frozenset({"packed_rows", "unpadding"})
    mixes: ClassVar[str] = "its masks depend on how far keys are away"

    summary = "attention with dynamic masks before self-attention"

    max_distance: int = bounded(1024, least=1)
    relu: bool = True

    def check(self, config) -> None:
        inside = config.position.acts & {"score_terms", "head_terms"}
        if inside:
            raise ValueError(
                f"position {config.position.type!r} has terms for one attention of each layer, but block"
                " 'mask_attention_network' has two; use 'rotary', a score bias or a position at the input such as"
                " 'sinusoidal_absolute'."
            )
        check_window_block("mask_attention_network", config, "keys and values of a second attention")

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [
            SublayerPlan(NAME, "attention"),
            SublayerPlan("attention", "attention"),
            *reading,
            SublayerPlan("feedforward", "feedforward"),
        ]

    def cache_layer(self, config) -> PartsCacheLayer:
        return PartsCacheLayer()

    def build(self, config, **where) -> MaskAttentionNetworkLayer:
        return MaskAttentionNetworkLayer(config, self, **where)
