# SPDX-License-Identifier: Apache-2.0
"""ALiBi: scores fall linearly with distance, in every head at a slope of its own that is not learned."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.components import register
from .base import Position, PositionSpec, ScoreBias


def slope_exponents(heads: int) -> list[float]:
    """e_h of the slopes 2^-e_h (Press et al. 2022, section 3; for head counts that are no power of two as in the
    released code).

    2^k heads: 8 / 2^k, 16 / 2^k, ..., 8. Other counts: those of the power of two below, then every other one of
    the next power, from its first on.
    """
    below = 1 << (heads.bit_length() - 1)
    first = [8 * (index + 1) / below for index in range(below)]
    between = [4 * (2 * index + 1) / below for index in range(heads - below)]
    return first + between


class Alibi(Position, ScoreBias):
    """score_ij -= m_h |i - j|, m_h = 2^-e_h (Press et al. 2022, arXiv 2108.12409, section 3).

    In a decoder that is the paper's -m (i - j), in an encoder the symmetric form of its released code. No parameters;
    defined for any length. Distances count slots, as those of real tokens do on either side of padding.
    """

    relative = True
    exponents: Tensor

    def __init__(self, config):
        super().__init__()
        self.values = slope_exponents(config.num_attention_heads)
        # Exponents in place of slopes: half precision holds their few binary digits exactly.
        self.register_buffer("exponents", torch.tensor(self.values, dtype=torch.get_default_dtype()), persistent=False)

    def initialize(self, config, init) -> None:
        init.copy_(self.exponents, torch.tensor(self.values))

    def score_bias(self) -> Alibi:
        return self

    def block(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        """query_index [..., Tq], key_index [..., Tk] -> [..., H, Tq, Tk]."""
        return self.by_distance(key_index.unsqueeze(-2) - query_index.unsqueeze(-1)).movedim(0, -3)

    def by_distance(self, distance: Tensor) -> Tensor:
        """distance (key - query) [...] -> [H, ...]."""
        wide = torch.promote_types(self.exponents.dtype, torch.float32)  # bfloat16 counts to 256 and no further
        slopes = torch.exp2(-self.exponents.to(wide))
        bias = -slopes.view(-1, *[1] * distance.ndim) * distance.abs().to(wide)
        return bias.to(self.exponents.dtype)


@register("position", "alibi", aliases=("linear_bias",))
class AlibiSpec(PositionSpec):
    """No fields: slopes follow from the number of heads."""

    summary = "scores fall linearly with distance, each head at a fixed slope"
    acts = frozenset({"score_bias"})
    supports = frozenset({"neighbors"})

    def build(self, config, **where) -> Alibi:
        return Alibi(config)
