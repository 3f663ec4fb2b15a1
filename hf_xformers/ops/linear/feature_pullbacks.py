"""Feature maps that know their own pullback, for scans that evaluate a map again in their backward pass.

A scan asks a [`MapWithPullback`] for features and pullback at once; any other map is differentiated by
`torch.func.vjp`, which keeps every intermediate result and pads every slice with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.feature_map import MapWithPullback, Pull
from .feature_maps import ScaledFeatures, dpfp, elu_plus_one, positive_features, relative_elu


class NormalizedDPFP(MapWithPullback):
    """`dpfp(x, nu, normalize=True)`: with `r = relu([x, -x]) / sqrt(s)` the products `r_i r_{i+j}`, which sum to
    one."""

    def __init__(self, nu: int = 3, eps: float = 1e-6) -> None:
        self.nu, self.eps = nu, eps

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        return dpfp(x, self.nu, normalize=True, eps=self.eps)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        # Tokens last, as columns: a shift is then a slice of whole rows, and products of features with features of
        # keys run along rows. What is given out is a transposed view.
        nu, width, half = self.nu, 2 * x.shape[-1], x.shape[-1]
        x = x.mT.contiguous()
        wrapped = x.new_empty(*x.shape[:-2], width + 2 * nu, x.shape[-1])
        rectified = wrapped[..., nu : nu + width, :]
        torch.clamp(x, min=0.0, out=rectified[..., :half, :])
        torch.clamp(x, max=0.0, out=rectified[..., half:, :]).neg_()
        wrapped[..., :nu, :] = rectified[..., -nu:, :]
        wrapped[..., nu + width :, :] = rectified[..., :nu, :]
        near = _total(wrapped, range(nu + 1, 2 * nu + 1), width)
        total = (rectified * near).sum(-2, keepdim=True)
        root = total.clamp(min=self.eps).rsqrt()
        r = wrapped * root
        own, neighbours = r[..., nu : nu + width, :], [r[..., nu + j : nu + j + width, :] for j in range(1, nu + 1)]
        features = x.new_empty(*x.shape[:-2], nu, width, x.shape[-1])
        for target, neighbour in zip(features.unbind(-3), neighbours):
            torch.mul(own, neighbour, out=target)

        def pull(to_features: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
            # Piece by piece of the width of r, so that nothing as wide as the features is made.
            to_products = to_features.mT.unflatten(-2, (nu, width)).unbind(-3)
            to_r = torch.zeros_like(r)
            to_own = to_r[..., nu : nu + width, :]
            for j, (to_product, neighbour) in enumerate(zip(to_products, neighbours), start=1):
                to_own.addcmul_(to_product, neighbour)
                to_r[..., nu + j : nu + j + width, :].addcmul_(to_product, own)
            to_own[..., :nu, :] += to_r[..., nu + width :, :]  # what lies beyond the end belongs to the beginning
            # r = rectified * s^-1/2, s = sum_i rectified_i sum_j rectified_{i+j}; constant where the sum was too
            # small.
            by_root = (to_own * rectified).sum(-2, keepdim=True)
            by_root *= (root * root * root).mul_(-0.5).masked_fill_(total <= self.eps, 0.0)
            around = _total(wrapped, range(nu), width).add_(near)
            to_rectified = (to_own * root).addcmul_(by_root, around)
            to_rectified *= rectified.sign()  # 1 or 0: quicker than a boolean factor
            return ((to_rectified[..., :half, :] - to_rectified[..., half:, :]).mT.contiguous(),)

        return features.flatten(-3, -2).mT, None, pull


def _total(wrapped: Tensor, starts: range, width: int) -> Tensor:
    """The sum of the windows of that many rows."""
    result = wrapped[..., starts[0] : starts[0] + width, :].clone()
    for start in starts[1:]:
        result += wrapped[..., start : start + width, :]
    return result


class EluPlusOne(MapWithPullback):
    """`elu_plus_one(x)`, whose slope is 1 above one and the feature itself below."""

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        return elu_plus_one(x)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        features = elu_plus_one(x)
        return features, None, lambda to_features, _: (to_features * features.clamp(max=1.0),)


class RelativeElu(MapWithPullback):
    """`relative_elu(x)`, whose slope is the feature itself below zero and 1 over the divisor above."""

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        return relative_elu(x)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        features, steepest = relative_elu(x), x.amax(-1, keepdim=True).clamp_(min=0.0).add_(1.0).reciprocal_()
        return features, None, lambda to_features, _: (to_features * torch.minimum(features, steepest),)


class PositiveFeatures(MapWithPullback):
    """`positive_features(scale * x, W)`: `exp(scale W x)` relative to its largest entry, which is in the log
    factor."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, x: Tensor, *params: Tensor) -> ScaledFeatures:
        (projection,) = params
        return positive_features(x * self.scale, projection)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        projection, x = params[0], x * self.scale
        features, logs = positive_features(x, projection)

        def pull(to_features: Tensor, to_log: Tensor | None) -> tuple[Tensor, ...]:
            to_logits = to_features * features
            to_x = to_logits @ projection.to(to_logits.dtype)
            if to_log is not None:
                to_x.addcmul_(x, to_log[..., None], value=-1.0)
            if not active:
                return (to_x.mul_(self.scale),)
            to_projection = (to_logits.mT @ x).sum_to_size(projection.shape)
            return to_x.mul_(self.scale), to_projection

        return features, logs, pull
