# SPDX-License-Identifier: Apache-2.0
"""Linear attention whose feature maps are learned: one small linear map for each head, and what is made of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.initialization import seeded_normal
from ...core.reading_weights import weight_of
from ...core.weight_decay import Undecayed
from .linear import LinearAttention, LinearSpec


class HeadMap(Undecayed, nn.Module):
    """x -> W_h x + b_h for each head h: [B, H, t, d] -> [B, H, t, F]."""

    undecayed = ("weight",)

    def __init__(self, heads: int, width: int, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, features, width))
        self.bias = nn.Parameter(torch.empty(heads, features))

    def initialize(self, config, init) -> None:
        """The identity, cut where there are fewer features than channels. Where there are more, rotations of it
        follow: rows that are alike would have the same gradients, and stay alike."""
        _, features, width = self.weight.shape
        rows = [torch.eye(width)]
        while len(rows) * width < features:
            axes, triangle = torch.linalg.qr(seeded_normal((width, width), "head_map", len(rows)))
            rows.append(axes * triangle.diagonal().sign())  # one decomposition among those with other signs
        start = torch.cat(rows)[:features]
        init.copy_(self.weight, start.expand(self.weight.shape).to(self.weight))
        init.zeros_(self.bias)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return weight_of(self), weight_of(self, "bias")


def mapped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What a [`HeadMap`] of these tensors gives, as a function of them."""
    return x @ weight.to(x.dtype).mT + bias.to(x.dtype)[:, None]


class LearnedFeatures(LinearAttention):
    """Linear attention with learned maps on queries and keys, which a rotation has turned before: a score of the
    softmax attention that it replaces depends on the rotated ones, too."""

    rotates_inputs = True

    def __init__(self, config, spec: LinearSpec, **where):
        super().__init__(config, spec, **where)
        # Queries and keys each bring a root of the factor that a swap takes over from scores, such as T5's 1.0.
        self.root = 1.0 if spec.scale is None else float(spec.scale) ** 0.5


class LearnedFeaturesSpec(LinearSpec):
    """Base of specs with learned feature maps."""

    acts = frozenset({"rotation"})
    head_options = frozenset({"norm", "parts"})

    def check_fields(self) -> None:
        if self.scale is not None and self.scale <= 0:
            raise ValueError(f"{self.type} needs `scale` > 0, got {self.scale}.")
