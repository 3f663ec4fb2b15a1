# SPDX-License-Identifier: Apache-2.0
"""Feature maps that know their own pullback, for scans that evaluate a map again in their backward pass.

A scan asks a [`MapWithPullback`] for features and pullback at once; any other map is differentiated by
`torch.func.vjp`, which keeps every intermediate result and pads every slice with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..common.feature_map import MapWithPullback, Pull
from .feature_maps import (
    ScaledFeatures,
    dpfp,
    elu_plus_one,
    fourier_features,
    positive_features,
    relative_elu,
    relu_features,
    trigonometric_features,
)


class NormalizedDPFP(MapWithPullback):
    """`factor * dpfp(x, nu, normalize=True)`: with `r = relu([x, -x]) / sqrt(s)` the products `r_i r_{i+j}`, which sum
    to one, times a positive factor."""

    def __init__(self, nu: int = 3, eps: float = 1e-6, factor: float = 1.0) -> None:
        self.nu, self.eps, self.factor = nu, eps, factor

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        features = dpfp(x, self.nu, normalize=True, eps=self.eps)
        return features if self.factor == 1.0 else features * self.factor

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
        root = total.clamp(min=self.eps).rsqrt() * self.factor**0.5
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
            # r = rectified * (factor / s)^1/2, s = sum_i rectified_i sum_j rectified_{i+j}; constant where the sum was
            # too small.
            by_root = (to_own * rectified).sum(-2, keepdim=True)
            by_root *= (root * root * root).mul_(-0.5 / self.factor).masked_fill_(total <= self.eps, 0.0)
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


class FourierFeatures(MapWithPullback):
    """`fourier_features(scale * x, W)`; with `norm` `trigonometric_features(scale * x, W)`, whose log factor is half
    of the squared length."""

    def __init__(self, scale: float = 1.0, norm: bool = False) -> None:
        self.scale, self.norm = scale, norm

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor | ScaledFeatures:
        (projection,) = params
        return (trigonometric_features if self.norm else fourier_features)(x * self.scale, projection)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        projection, x = params[0], x * self.scale
        features, logs = fourier_features(x, projection), 0.5 * (x * x).sum(-1) if self.norm else None

        def pull(to_features: Tensor, to_log: Tensor | None) -> tuple[Tensor, ...]:
            (cos, sin), (to_cos, to_sin) = features.chunk(2, dim=-1), to_features.chunk(2, dim=-1)
            to_logits = (to_sin * cos).addcmul_(to_cos, sin, value=-1.0)
            to_x = to_logits @ projection.to(to_logits.dtype)
            if self.norm and to_log is not None:
                to_x.addcmul_(x, to_log[..., None])
            return _with_projection(to_x, to_logits, x, projection, self.scale, active)

        return features, logs, pull


class ReluFeatures(MapWithPullback):
    """`relu_features(scale * x, W, eps=eps)`, or without a param `relu(scale * x) + eps`."""

    def __init__(self, scale: float = 1.0, eps: float = 0.0) -> None:
        self.scale, self.eps = scale, eps

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        return relu_features(x * self.scale, *params, eps=self.eps)

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        projection, x = params[0] if params else None, x * self.scale
        features = relu_features(x, projection)
        factor = 1.0 if projection is None else projection.shape[-2] ** -0.5
        slope = features.sign()  # 1 or 0: quicker than a boolean factor
        if self.eps:
            features += self.eps

        def pull(to_features: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
            to_logits = to_features * slope
            if projection is None:
                return (to_logits.mul_(self.scale),)
            to_logits.mul_(factor)
            to_x = to_logits @ projection.to(to_logits.dtype)
            return _with_projection(to_x, to_logits, x, projection, self.scale, active)

        return features, None, pull


def _with_projection(
    to_x: Tensor, to_logits: Tensor, x: Tensor, projection: Tensor, scale: float, active: Sequence[int]
) -> tuple[Tensor, ...]:
    """The gradient of the input before `scale`, and that of W where it is wanted, from those of scale * x and of the
    logits W x scale."""
    if not active:
        return (to_x.mul_(scale),)
    return to_x.mul_(scale), (to_logits.mT @ x).sum_to_size(projection.shape)


class Rescaled(MapWithPullback):
    """The features of all channels but the last one, times that one: for factors that a map of single tokens cannot
    know."""

    def __init__(self, feature_map: Callable[..., Tensor]) -> None:
        self.feature_map = feature_map

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        return self.feature_map(x[..., :-1], *params) * x[..., -1:]

    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        factor, inner = x[..., -1:], self.feature_map
        if isinstance(inner, MapWithPullback):
            features, _, pull_inner = inner.with_pullback(x[..., :-1], params, active)
        else:

            def evaluate(x: Tensor, *chosen: Tensor) -> Tensor:
                values = list(params)
                for index, value in zip(active, chosen):
                    values[index] = value
                return inner(x, *values)

            features = inner(x[..., :-1], *params)

            def pull_inner(to_features: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
                # Not before gradients are there: a forward pass may run under hooks that vjp does not allow.
                return torch.func.vjp(evaluate, x[..., :-1], *(params[index] for index in active))[1](to_features)

        def pull(to_features: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
            to_factor = (to_features * features).sum(-1, keepdim=True)
            to_x, *to_params = pull_inner(to_features * factor, None)
            return torch.cat([to_x, to_factor], dim=-1), *to_params

        return features * factor, None, pull
