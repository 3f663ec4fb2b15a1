# SPDX-License-Identifier: Apache-2.0
"""A language-model head whose output vectors have unit length."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..compat import tied_linear
from ..core.components import register
from ..core.reading_weights import weight_of
from .base import HeadSpec
from .language_model import LanguageModelHead


class FixNormHead(LanguageModelHead):
    """logits_w = h E[w] / |E[w]| + b_w (Nguyen & Salazar 2019, arXiv 1910.05895, section 3.2).

    With a final ScaleNorm these are g times cosines: g is the temperature.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        inside = tied_linear(self.decoder)
        bias = None if inside.bias is None else weight_of(inside, "bias")
        return F.linear(hidden_states, F.normalize(weight_of(self.decoder), dim=-1, eps=1e-5), bias)


@register("head", "fix_norm")
class FixNormHeadSpec(HeadSpec):
    """bias: one per vocabulary entry."""

    summary = "one projection onto the vocabulary, its vectors of unit length"

    bias: bool = False

    def build(self, config, **where) -> FixNormHead:
        return FixNormHead(config, transform=None, bias=self.bias, scale=False)
