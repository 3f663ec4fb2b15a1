# SPDX-License-Identifier: Apache-2.0
"""Disagreement of heads: an auxiliary loss that keeps heads from doing the same."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..core.components import bounded
from ..ops.common.products import widened
from .shared.head_parts import HeadLoss, HeadLossModule, Heads, mean_over_tokens, register_loss

KINDS = ("subspace", "position", "output")


class DisagreementLoss(HeadLossModule):
    """-lambda D, to be added to a loss that is made small, with D the disagreement of heads (Li, Tu, Yang, Lyu, Zhang
    2018, arXiv 1810.10183, section 3.2), for vectors a^h of H heads at a token:

        subspace, output:  D = -1/H^2 sum_ij cos(a^i, a^j), a^h the value of a key, or what a head has read
        position:          D = -1/H^2 sum_ij sum_k A^i_k A^j_k, A^h the weights of a query on the keys k

    each a mean over real tokens, and over the layers of the tower. The sums over pairs of heads are squares of sums
    over heads, |sum_h a^h / |a^h||^2 and sum_k (sum_h A^h_k)^2, so that time and memory are O(H T d), and O(H T S)
    time for `position`, whose weights are made for a block of queries at a time, before dropout.
    """

    def __init__(self, spec: DisagreementSpec, layers: int):
        super().__init__()
        self.spec, self.layers = spec, layers

    def forward(self, heads: Heads) -> dict[str, Tensor]:
        found = {
            "subspace": lambda: mean_over_tokens(similarity(heads.value.transpose(1, 2)), heads.real_keys),
            "output": lambda: mean_over_tokens(similarity(heads.output), heads.real_queries),
            "position": lambda: mean_over_tokens(overlap(heads), heads.real_queries),
        }
        share = self.spec.weight / self.layers
        return {f"disagreement_{kind}": share * found[kind]() for kind in self.spec.of}


def similarity(vectors: Tensor) -> Tensor:
    """Mean cosine of all pairs of heads, those with themselves included: [B, T, H, d] -> [B, T], in [0, 1]."""
    units = F.normalize(widened(vectors)[0], dim=-1)
    return units.mean(-2).square().sum(-1)


def overlap(heads: Heads) -> Tensor:
    """Mean product of the weights of all pairs of heads, summed over keys, [B, T]."""
    return heads.sums_of_weights(lambda weights, rows: widened(weights)[0].mean(1).square().sum(-1), slice(None))


@register_loss("disagreement_regularization")
class DisagreementSpec(HeadLoss):
    """of: what is compared, of subspace (values), position (attention weights, which attention has to form) and output
    (what heads have read). weight: lambda, the factor on each."""

    of: tuple[str, ...] = ("output",)
    weight: float | int = bounded(1.0, least=0)

    def reads_weights(self) -> bool:
        return "position" in self.of

    def check_fields(self) -> None:
        if not self.of or any(kind not in KINDS or self.of.count(kind) > 1 for kind in self.of):
            raise ValueError(
                f"disagreement_regularization takes {', '.join(KINDS)} under `of`, one at least and each once, got"
                f" {self.of}."
            )

    def build(self, config, *, layer_idx: int) -> DisagreementLoss:
        return DisagreementLoss(self, config.num_hidden_layers)
