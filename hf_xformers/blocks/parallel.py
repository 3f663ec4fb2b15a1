# SPDX-License-Identifier: Apache-2.0
"""Attention and feed-forward side by side."""

from __future__ import annotations

from typing import ClassVar

from ..core.components import register
from .base import BlockSpec, Kind, Reads, SublayerPlan


@register("block", "parallel")
class ParallelBlockSpec(BlockSpec):
    """x + SA(norm_1(x)) + FF(norm_2(x)): both read the same residual stream and are added together (Wang & Komatsuzaki
    2021, GPT-J; Black et al. 2022, arXiv 2204.06745, section 2.1). A decoder's cross-attention stands next to them.

    shared_norm: one norm n of the stream for all sublayers of a layer, x + SA(n) + FF(n) (GPT-J; Chowdhery et al.
    2022, arXiv 2204.02311, section 2).
    """

    supports = frozenset({"context_parallel", "packed_rows", "unpadding"})
    in_sequence: ClassVar[bool] = False
    summary = "attention and feed-forward side by side, added together"

    shared_norm: bool = False

    def check(self, config) -> None:
        if not config.residual.additive:
            raise ValueError(
                f"block 'parallel' adds several sublayers to one residual stream, but residual"
                f" {config.residual.type!r} does more than add to it; use 'pre_ln' or another one that adds."
            )
        if self.shared_norm and not config.residual.shares_input:
            raise ValueError(
                f"block 'parallel' with `shared_norm` has one norm before all sublayers of a layer, which residual"
                f" {config.residual.type!r} does not have; use 'pre_ln', or leave `shared_norm` at False."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reads: Reads = "same_input" if self.shared_norm else "same_stream"
        kinds: tuple[Kind, ...] = ("cross_attention", "feedforward") if cross else ("feedforward",)
        return [SublayerPlan("attention", "attention"), *(SublayerPlan(kind, kind, reads=reads) for kind in kinds)]
