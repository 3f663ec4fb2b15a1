# SPDX-License-Identifier: Apache-2.0
"""alpha-entmax: softmax's relatives whose small weights are zero.

    entmax_alpha(s) = argmax over the simplex of p s + sum_j (p_j - p_j^alpha) / (alpha (alpha - 1))
                    = [(alpha - 1) s_j - tau]_+ ^ (1 / (alpha - 1)),   tau such that the sum is one.

alpha -> 1 is the softmax, alpha = 2 sparsemax. Peters, Niculae and Martins 2019 (arXiv 1905.05702), section 3; with an
alpha to learn Correia, Niculae and Martins 2019 (arXiv 1909.00015), section 3. The threshold tau is exact, from sorted
scores, for alpha = 1.5 and 2. For any other alpha in (1, 2] it is the root of

    h(tau) = |[(alpha - 1) s - tau]_+|_e - 1,   e = 1 / (alpha - 1),

a norm, so that h is convex and falls: Newton's steps from the left of the root never pass it, and a handful of them do
what takes bisection fifty. On a processor, where a sort takes a hundred such steps' time and one can look whether a
step still changed something, these are the way for every alpha.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common.derivatives import LITERAL, first_derivative_only
from .common.exponential import vectorised

NEWTON_STEPS = 8  # of which the last two change nothing in float64, for alpha from 1.01 on and 20,000 scores
_MOST_STEPS = 64  # where one looks: sparsemax takes more of them the more scores there are
_SAMPLED, _WORTH_SAMPLING = 8, 1 << 10
_BISECTIONS = 60


def entmax(scores: Tensor, alpha: Tensor | float, mask: Tensor | None = None) -> Tensor:
    """alpha-entmax over the last axis, where `mask` is True.

    scores [..., S]; alpha: a number in [1, 2], or a tensor in (1, 2] that broadcasts to [..., 1] and gets a gradient;
    mask broadcasts to scores. In float32 at least. A row that sees nothing gives zeros, in the gradient as well.

    Raises:
        ValueError: a number beyond [1, 2].
    """
    scores, empty = _masked(scores, mask)
    if isinstance(alpha, Tensor):
        weights: Tensor = _Entmax.apply(scores, alpha.to(scores.dtype).expand(*scores.shape[:-1], 1))
    elif alpha == 1.0:
        weights = torch.softmax(scores, dim=-1)
    elif 1.0 < alpha <= 2.0:
        weights = _Entmax.apply(scores, float(alpha))
    else:
        raise ValueError(f"alpha must lie between 1 (softmax) and 2 (sparsemax), got {alpha}.")
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def entmax_reference(scores: Tensor, alpha: Tensor | float, mask: Tensor | None = None) -> Tensor:
    """The same by bisection, as a function that can be differentiated any number of times but exactly once at the
    threshold: the last step is one of Newton's, whose derivative is that of the root."""
    scores, empty = _masked(scores, mask)
    if not isinstance(alpha, Tensor):
        if alpha == 1.0:
            return torch.softmax(scores, dim=-1) if empty is None else torch.softmax(scores, -1).masked_fill(empty, 0)
        alpha = scores.new_full((1,), alpha)
    less = alpha.to(scores.dtype) - 1
    z = scores * less
    with torch.no_grad():
        high = z.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            enough = ((z - middle).clamp(min=0) ** (1 / less)).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        seen = z > low
    distance = (z - low).masked_fill(~seen, 1.0)
    powers = (distance ** (1 / less)).masked_fill(~seen, 0.0)
    slope = ((distance ** (1 / less - 1)) / less).masked_fill(~seen, 0.0).sum(-1, keepdim=True).detach()
    threshold = low + (powers.sum(-1, keepdim=True) - 1) / slope
    weights = ((z - threshold).clamp(min=0).masked_fill(~seen, 1.0) ** (1 / less)).masked_fill(~seen, 0.0)
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def _masked(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores in float32 at least, relative to the largest that is visible, with hidden ones far below; and which rows
    see nothing."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return scores - scores.detach().amax(-1, keepdim=True), None
    empty = ~mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    top = scores.detach().amax(-1, keepdim=True).masked_fill(empty, 0.0)
    scores = (scores - top).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.masked_fill(empty, 0.0), empty


class _Entmax(torch.autograd.Function):
    """scores [..., S], the largest 0; alpha a number or [..., 1]. Keeps the weights and alpha alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor | float) -> Tensor:
        number = None if isinstance(alpha, Tensor) else alpha
        if vectorised(scores):
            less = alpha - 1
            z = scores * less
            weights = normalized(*distances(z, threshold(z, less), less))
        elif number == 2.0:
            z = scores.clamp(min=-2.0)  # what is 1 or more below the largest has no weight
            weights = (z - _sparsemax_threshold(z)).clamp_(min=0)
        elif number == 1.5:
            z = (scores / 2).clamp(min=-2.0)
            weights = (z - _entmax15_threshold(z)).clamp_(min=0).square_()
        else:
            weights = _by_newton(scores, alpha - 1)
        ctx.number = number
        ctx.save_for_backward(weights, *([alpha] if isinstance(alpha, Tensor) else []))
        return weights

    @staticmethod
    @first_derivative_only("alpha-entmax", LITERAL)
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.number
        positive = weights > 0
        safe = weights.masked_fill(~positive, 1.0)
        slope = positive.to(weights.dtype) if ctx.number == 2.0 else (safe ** (2 - alpha)).masked_fill(~positive, 0.0)
        total = slope.sum(-1, keepdim=True)
        to_scores = slope * (grad - (slope * grad).sum(-1, keepdim=True) / total)
        if not ctx.needs_input_grad[1]:
            return to_scores, None
        # Correia et al. 2019, proposition 1.
        entropy = weights * safe.log()
        share = slope / total
        moved = (weights - share) / (alpha - 1) ** 2
        moved = moved - (entropy - share * entropy.sum(-1, keepdim=True)) / (alpha - 1)
        return to_scores, (grad * moved).sum(-1, keepdim=True)


def _sparsemax_threshold(z: Tensor) -> Tensor:
    """Martins and Astudillo 2016 (arXiv 1602.02068), algorithm 1."""
    ordered = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    thresholds = (ordered.cumsum(-1) - 1) / count
    support = (ordered > thresholds).sum(-1, keepdim=True)
    return thresholds.gather(-1, support - 1)


def _entmax15_threshold(z: Tensor) -> Tensor:
    """Peters, Niculae and Martins 2019, algorithm 2."""
    ordered = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean = ordered.cumsum(-1) / count
    spread = count * (ordered.square().cumsum(-1) / count - mean.square())
    thresholds = mean - ((1 - spread) / count).clamp_(min=0).sqrt()
    support = ((thresholds <= ordered) & (ordered > -1)).sum(-1, keepdim=True)
    return thresholds.gather(-1, support - 1)


def _by_newton(scores: Tensor, less: Tensor | float) -> Tensor:
    """`less`: alpha - 1. The largest score is 0, so that at the start, tau = -1, the norm is at least 1."""
    z = (scores * less).clamp_(min=-1.0)
    exponent = 1 / less
    tau = torch.full_like(z[..., :1], -1.0)
    for _ in range(NEWTON_STEPS):
        distance = (z - tau).clamp_(min=0)
        powers = distance**exponent
        total = powers.sum(-1, keepdim=True)
        # d|x|_e / dtau = -sum x^(e - 1) |x|^(1 - e)
        slopes = (powers / distance.masked_fill(distance == 0, 1.0)).sum(-1, keepdim=True)
        norm = total**less
        tau = tau + (norm - 1) * total / (norm * slopes)
    weights = (z - tau).clamp_(min=0) ** exponent
    return weights / weights.sum(-1, keepdim=True)


def threshold(z: Tensor, less: Tensor | float) -> Tensor:
    """tau [..., 1] of z [..., S] = (alpha - 1) s, the largest 0 (a row of -inf alone gives NaN), by as many of
    Newton's steps as change something. less: alpha - 1, a number or [..., 1].

    Most steps are those of every eighth score, which stands for the eight: what they find is near the root. From
    there, or from a start that is none, a step leads to the left of the root (not beyond -1) and the next ones to it.
    """
    start = torch.full_like(z[..., :1], -1.0)
    if z.shape[-1] >= _WORTH_SAMPLING:
        sample = z[..., ::_SAMPLED].contiguous()
        start = _newton(sample, less, start, 1e-2, _SAMPLED).nan_to_num_(nan=-1.0)
    # Steps get shorter by their square, so that after a short one only rounding is left; but those of sparsemax, whose
    # h has corners, do not, and a step of alpha = 1.5 costs little.
    simple = not isinstance(less, Tensor) and less in (0.5, 1.0)
    eps = torch.finfo(z.dtype).eps
    return _newton(z, less, start, 4 * eps if simple else eps**0.5 / 8, 1)


def _newton(z: Tensor, less: Tensor | float, tau: Tensor, short: float, copies: int) -> Tensor:
    """Steps from tau for scores that are there `copies` times, until none is longer than `short` times its tau."""
    for _ in range(_MOST_STEPS):
        distance, slopes = distances(z, tau, less)
        slope = slopes.sum(-1, keepdim=True)
        total = slopes.mul_(distance).sum(-1, keepdim=True)
        norm = (copies * total) ** less
        # d|x|_e / dtau = -sum x^(e - 1) |x|^(1 - e)
        before, tau = tau, (tau + (norm - 1) * total / (norm * slope)).clamp_(min=-1.0)
        if not bool(((tau - before).abs() > -short * tau).any()):
            break
    return tau


def distances(z: Tensor, tau: Tensor, less: Tensor | float) -> tuple[Tensor, Tensor]:
    """x = [z - tau]_+ and x^(e - 1), e = 1 / less, zero where x is: their product is the weights."""
    distance = (z - tau).clamp_(min=0)
    if not isinstance(less, Tensor):
        if less == 1.0:
            return distance, distance.sign()
        if less == 0.5:
            return distance, distance.clone()
    # A power by its logarithm takes half the time, but that of zero takes eight times as long as any other.
    powers = distance.clamp(min=torch.finfo(z.dtype).tiny).log2_().mul_(1 / less - 1).exp2_()
    return distance, powers.mul_(distance.sign())


def normalized(distance: Tensor, slopes: Tensor) -> Tensor:
    """The weights, in the place of the slopes; rows of zeros stay."""
    weights = slopes.mul_(distance)
    return weights.div_(weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny))
