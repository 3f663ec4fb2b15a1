# SPDX-License-Identifier: Apache-2.0
"""Feature maps `phi` of kernel attention, and the random matrices some of them need.

A map takes `[..., d]` to non-negative (unless said otherwise) features `[..., F]`. Maps with an exponential in them
return a pair [`ScaledFeatures`]: features of moderate size and the logarithm of a factor per vector, so that nothing
overflows; the factor of a query cancels in attention, the factor of a key is the `log_weight` of
`linear_attention`. Random features estimate `exp(x . y)`; for the softmax kernel scale queries and keys by
`d ** -0.25` before the map. Random features are computed in float32 at least, also under autocast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.exponential import exp_
from ..common.products import without_autocast
from ..common.segments import accumulation_dtype


class ScaledFeatures(NamedTuple):
    """The feature vector is `phi * exp(log_scale)[..., None]`."""

    phi: Tensor  # [..., F]
    log_scale: Tensor  # [...]


def elu_plus_one(x: Tensor) -> Tensor:
    """`elu(x) + 1`, strictly positive, F = d. Katharopoulos et al. 2020, equation 7."""
    # Not as torch's elu, which subtracts the 1 that would be added: of e^-17 nothing would be left.
    return exp_(x.clamp(max=0.0)) + F.relu(x)


def relative_elu(x: Tensor) -> Tensor:
    """`elu_plus_one(x)` over its largest entry, without underflow. For queries: a factor of a query cancels in
    attention, and its gradient with it, so it counts as a constant."""
    largest = x.detach().amax(-1, keepdim=True)
    below = x.clamp(max=0.0) - largest.clamp(max=0.0)
    return (exp_(below) + F.relu(x)) / (largest.clamp(min=0.0) + 1.0)


def relu_features(x: Tensor, projection: Tensor | None = None, *, eps: float = 0.0) -> Tensor:
    """`relu(W x) / sqrt(m) + eps` with `projection` W `[m, d]` (per head: `[H, m, d]`), or `relu(x) + eps` without
    one.

    With normal rows in W, `E[phi(x) . phi(y)]` (eps = 0) is half the arc-cosine kernel of order 1 (Cho and Saul 2009);
    used by Choromanski et al. 2021, section 4 ("Performer-ReLU") and Peng et al. 2021, section 3.
    """
    if projection is None:
        return F.relu(x) + eps
    return F.relu(_project(x, projection)) * projection.shape[-2] ** -0.5 + eps


def positive_features(x: Tensor, projection: Tensor) -> ScaledFeatures:
    """FAVOR+: `exp(W x - |x|^2 / 2) / sqrt(m)`, F = m. Choromanski et al. 2021, lemma 1 and equation 7.

    Unbiased: `E[phi(x) . phi(y)] = exp(x . y)` when the rows of `projection` `[m, d]` are normal in their marginals.
    """
    logits = _project(x, projection)
    # The shift appears in the features and, with the other sign, in the scale: a constant for the gradient.
    shift = logits.detach().amax(-1, keepdim=True)
    scale = (shift.squeeze(-1) - 0.5 * math.log(projection.shape[-2])).sub(_square(x), alpha=0.5)
    return ScaledFeatures(exp_(logits.sub_(shift)), scale)


def hyperbolic_features(x: Tensor, projection: Tensor) -> ScaledFeatures:
    """FAVOR+, hyperbolic: `exp(-|x|^2 / 2) / sqrt(2 m) [exp(W x), exp(-W x)]`, F = 2 m. Lemma 1, second form."""
    logits = _project(x, projection)
    shift = logits.detach().abs().amax(-1)
    scale = (shift - 0.5 * math.log(2 * projection.shape[-2])).sub(_square(x), alpha=0.5)
    return ScaledFeatures(exp_(torch.cat([logits, -logits], dim=-1).sub_(shift[..., None])), scale)


def trigonometric_features(x: Tensor, projection: Tensor) -> ScaledFeatures:
    """FAVOR: `exp(|x|^2 / 2) / sqrt(m) [cos(W x), sin(W x)]`, F = 2 m; products can be negative.

    Choromanski et al. 2020 (2006.03555). Without the scale these are [`fourier_features`].
    """
    return ScaledFeatures(fourier_features(x, projection), 0.5 * _square(x))


def fourier_features(x: Tensor, projection: Tensor) -> Tensor:
    """`[cos(W x), sin(W x)] / sqrt(m)`, F = 2 m: features of the Gaussian kernel, `E[phi(x) . phi(y)] =
    exp(-|x - y|^2 / 2)` (Rahimi and Recht 2007), which random feature attention uses (Peng et al. 2021, section 3.1).
    `|phi(x)| = 1`; products can be negative.
    """
    logits = _project(x, projection)
    return torch.cat([logits.cos(), logits.sin()], dim=-1) * projection.shape[-2] ** -0.5


def random_features_reference(x: Tensor, projection: Tensor, kind: str) -> Tensor:
    """The three maps above without any scaling: kind "positive", "hyperbolic" or "trigonometric"."""
    logits, half, m = x @ projection.mT, (x * x).sum(-1, keepdim=True) / 2, projection.shape[-2]
    if kind == "positive":
        return (logits - half).exp() / math.sqrt(m)
    if kind == "hyperbolic":
        return torch.cat([(logits - half).exp(), (-logits - half).exp()], dim=-1) / math.sqrt(2 * m)
    return half.exp() * torch.cat([logits.cos(), logits.sin()], dim=-1) / math.sqrt(m)


def dpfp(x: Tensor, nu: int = 3, *, normalize: bool = False, eps: float = 1e-6) -> Tensor:
    """Deterministic parameter-free projection, F = 2 d nu: with `r = relu([x, -x])` the products
    `r_i r_{i+j}`, `j = 1..nu`, indices modulo `2 d`. Schlag et al. 2021, equation 37.

    The result is 0 for `x = 0`. With `normalize` it is what `sum_normalize(phi, eps)` makes of it, for less work: the
    sum divides the short `r`.

    Raises:
        ValueError: nu outside 1..2d-1.
    """
    if not 1 <= nu <= 2 * x.shape[-1] - 1:
        raise ValueError(f"nu must be between 1 and 2 * {x.shape[-1]} - 1, got {nu}.")
    r = F.relu(torch.cat([x, -x], dim=-1))
    wrapped = torch.cat([r, r[..., :nu]], dim=-1)
    near = torch.stack([wrapped[..., j : j + r.shape[-1]] for j in range(1, nu + 1)], dim=-2)
    if normalize:
        r = r / (r * near.sum(-2)).sum(-1, keepdim=True).clamp(min=eps)
    return (r.unsqueeze(-2) * near).flatten(-2)


def dpfp_reference(x: Tensor, nu: int = 3) -> Tensor:
    """The index formula of [`dpfp`], one feature at a time."""
    r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], dim=-1)
    width = r.shape[-1]
    return torch.stack([r[..., i] * r[..., (i + j) % width] for j in range(1, nu + 1) for i in range(width)], dim=-1)


def sum_normalize(phi: Tensor, eps: float = 1e-6) -> Tensor:
    """Features divided by their sum, at least `eps`: all zeros stay zeros. Schlag et al. 2021, section 4.2."""
    return phi / phi.sum(-1, keepdim=True).clamp(min=eps)


def normalized_positive_features(x: Tensor, projection: Tensor) -> Tensor:
    """[`hyperbolic_features`] divided by their sum, in which the factor of a vector cancels: a softmax over
    `[W x, -W x]`, F = 2 m."""
    logits = _project(x, projection)
    return torch.softmax(torch.cat([logits, -logits], dim=-1), dim=-1)


def normalized_elu(x: Tensor) -> Tensor:
    """[`elu_plus_one`] divided by its sum."""
    return sum_normalize(elu_plus_one(x))


def unit_vectors(x: Tensor) -> Tensor:
    """`x` divided by its length, `[..., d]` in float32 at least; vectors shorter than 1e-3 stay short, so that the
    slope of a zero is finite."""
    x = x.to(accumulation_dtype(x.dtype))
    return x * ((x * x).sum(-1, keepdim=True) + 1e-6).rsqrt()


def random_matrix(
    num_features: int,
    dim: int,
    *,
    orthogonal: bool = True,
    scaling: int = 0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A random projection `[num_features, dim]` for the maps above. Choromanski et al. 2021, section 2.4.

    Args:
        orthogonal: rows orthogonal within blocks of `dim`; False: independent normal rows.
        scaling: lengths of orthogonal rows: 0 = those of independent normal vectors (unbiased), 1 = all `sqrt(dim)`
            ("regularized softmax", a different kernel).
        generator: source of randomness, on `device`.

    Raises:
        ValueError: num_features or dim below 1, scaling not 0 or 1.
    """
    if num_features < 1 or dim < 1:
        raise ValueError(f"A random matrix needs at least one row and one column, got {num_features} x {dim}.")
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 (lengths of normal vectors) or 1 (all sqrt(dim)), got {scaling}.")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=accumulation_dtype(dtype))

    rows = normal(num_features, dim)
    if not orthogonal:
        return rows.to(dtype)
    blocks = normal(-(-num_features // dim), dim, dim)
    q, r = torch.linalg.qr(blocks)
    # LAPACK returns a QR with a preferred sign: blocks would not be uniform over the rotations, and positive features
    # biased.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[:, None, :]
    directions = q.mT.reshape(-1, dim)[:num_features]
    lengths = rows.norm(dim=-1, keepdim=True) if scaling == 0 else math.sqrt(dim)
    return (directions * lengths).to(dtype)


def _project(x: Tensor, projection: Tensor) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    with without_autocast(x):
        return x.to(dtype) @ projection.to(dtype).mT


def _square(x: Tensor) -> Tensor:
    x = x.to(accumulation_dtype(x.dtype))
    return (x * x).sum(-1)
