# SPDX-License-Identifier: Apache-2.0
"""CSALR: attention decomposed into what tokens take of a few landmarks and what landmarks read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.landmarks import landmark_attention, landmark_factors, ridge_solve
from .shared.base import Attention
from .shared.spec import AttentionSpec


class CSALRAttention(Attention):
    """O = softmax(Q K~^T) (softmax(Q~ K~^T) + ridge I)^-1 softmax(Q~ K^T) V, all scores times `scale`.

    Chen et al. 2020 (IJCAI, 10.24963/ijcai.2020/285), in the form of section 4.4.2 of the survey, with ridge = 1: the
    landmarks Q~ and K~ [m, d] are averages of consecutive real tokens, segments of equal length up to one token
    (average pooling). A text of fewer tokens has each of them for a landmark. Nothing is inverted: the system of
    equations is solved for the m rows that the landmarks read.

    All three factors have rows that sum to 1, so the rows of the product sum to 1 / (1 + ridge), a half at the
    default; `renormalize` multiplies by 1 + ridge. As ridge goes to 0 with a landmark for each token the product
    becomes softmax attention.

    Time O(T m d + m^3) per head, memory O(T m). The weights given out are those of the approximation: they can be
    negative. They have no dropout: `attention_probs_dropout_prob` has no effect.
    """

    spec: CSALRSpec

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        key, value, mask = self.repeated(key), self.repeated(value), context.padding_mask
        weights = None
        if self.wants_weights(context):
            weights = self.matrix(query, key, mask)
            output = weights @ value
        else:
            output = landmark_attention(
                *(query, key, value, lambda middle, read: ridge_solve(middle, read, self.spec.ridge)),
                num_landmarks=self.spec.num_landmarks,
                key_padding_mask=mask,
                query_padding_mask=mask,
                scale=self.scaling,
                exact_when_short=False,
            )
            if self.spec.renormalize:
                output = output * (1 + self.spec.ridge)
        return output.transpose(1, 2), weights

    def matrix(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """The approximated attention matrix [B, H, T, T], its three factors multiplied out."""
        real = query.new_ones(query.shape[0], query.shape[2], dtype=torch.bool) if mask is None else mask
        first, middle, last = landmark_factors(query, key, self.spec.num_landmarks, real, self.scaling)
        with torch.autocast(query.device.type, enabled=False):
            inverse = ridge_solve(middle, torch.eye(middle.shape[-1]).to(middle).expand_as(middle), self.spec.ridge)
            product = first @ inverse @ last
        return (product * (1 + self.spec.ridge) if self.spec.renormalize else product).to(query.dtype)


@register("attention", "csalr")
class CSALRSpec(AttentionSpec):
    """num_landmarks: averages that stand for the text. ridge: what is added to the diagonal of the landmarks' own
    attention before it is inverted. renormalize: rows of the whole sum to 1 instead of 1 / (1 + ridge)."""

    summary = "tokens combine what a few landmarks read, through a regularized inverse: linear time"
    head_options = frozenset({"norm"})
    why_not: ClassVar[Mapping[str, str]] = {"causal": "its landmarks are means over all tokens, later ones too."}

    num_landmarks: int = bounded(64, "landmarks", least=1)
    ridge: float | int = bounded(1.0, above=0)
    renormalize: bool = False

    def weighs(self, config) -> bool:
        return False

    def build(self, config, **where) -> CSALRAttention:
        return CSALRAttention(config, self, **where)
