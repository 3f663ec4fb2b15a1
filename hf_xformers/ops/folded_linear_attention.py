"""Bidirectional linear attention with the projections of values and outputs folded into its sums.

With features phi of width F per head, and X the states that the values W_v x + b_v are made of,

    sum_j phi(k_j)^T v_j     = (sum_j phi(k_j)^T x_j) W_v^T + (sum_j phi(k_j))^T b_v
    out_i = W_o [heads] + b  = sum_h (phi(q_ih) / (phi(q_ih) . z_h)) (S_h W_oh^T) + b

so neither values nor the outputs of heads are made for single tokens: two products over the text stand where there were
four. This pays while a head has no more features than dimensions, in texts longer than the states are wide. The function
is that of Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 4-6; the order of its products is ours.

Names: D width of the states, W = H F features of all heads, side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._linear_kernels import guard, inverse_or_zero
from .derivatives import LITERAL, first_derivative_only
from .feature_pullbacks import EluPlusOne
from .segments import check_padding_mask, segments


def folded_linear_attention(
    q: Tensor,
    k: Tensor,
    states: Tensor,
    value: tuple[Tensor, Tensor | None],
    output: tuple[Tensor, Tensor | None],
    feature_map: EluPlusOne,
    *,
    heads: int,
    key_padding_mask: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Attention of all tokens to all tokens, from the states that values are projected from to the projected output.

    Args:
        q, k: queries and keys of all heads, side by side, `[B, T, H d]` and `[B, S, H d]`.
        states: `[B, S, D]`, of which the values are projected.
        value: weight `[H d_v, D]` and bias `[H d_v]` (or None) of that projection.
        output: weight `[D_out, H d_v]` and bias `[D_out]` (or None) of the projection that follows.
        feature_map: a map that acts on each entry by itself, with its pullback.
        key_padding_mask: `[B, S]`, True = real token.
        eps: added to the denominator.

    Returns:
        `[B, T, D_out]`. A query that sees no key gets the bias. Time O((T + S) D H d), and O(D H d d_v) once; memory O(T D).

    Raises:
        ValueError: a mask that is not `[B, S]`.
    """
    check_padding_mask(key_padding_mask, *k.shape[:2])
    batch, width = k.shape[0], k.shape[2]
    collected, z = _Collect.apply(k, states, key_padding_mask, feature_map)
    (value_weight, value_bias), (output_weight, output_bias) = value, output
    by_head = value_weight.view(heads, -1, value_weight.shape[1])  # [H, d_v, D]
    sums = collected.view(batch, heads, width // heads, -1) @ by_head.mT  # [B, H, F, d_v]
    if value_bias is not None:
        sums = sums + z.view(batch, heads, -1, 1) * value_bias.view(heads, 1, -1)
    spread = sums @ output_weight.view(-1, heads, sums.shape[-1]).permute(1, 2, 0)  # [B, H, F, D_out]
    return _Spread.apply(q, spread.flatten(1, 2), z, output_bias, heads, eps, feature_map)


class _Collect(torch.autograd.Function):
    """sum_j phi(k_j)^T x_j [B, W, D] and sum_j phi(k_j) [B, W]."""

    @staticmethod
    def forward(ctx, k, states, mask, feature_map):
        collected = k.new_zeros(k.shape[0], k.shape[2], states.shape[2])
        z = k.new_zeros(k.shape[0], k.shape[2])
        bounds = segments(k.shape[1])
        for start, stop in bounds:
            phi = _keep(feature_map(k[:, start:stop]), mask, start, stop)
            collected.baddbmm_(phi.mT, states[:, start:stop])
            z += phi.sum(1)
        ctx.save_for_backward(k, states, mask)
        ctx.options = bounds, feature_map
        return collected, z

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_collected, grad_z):
        k, states, mask = ctx.saved_tensors
        bounds, feature_map = ctx.options
        grad_k, grad_states = torch.empty_like(k), torch.empty_like(states) if ctx.needs_input_grad[1] else None
        for start, stop in bounds:
            phi, _, pull = feature_map.with_pullback(k[:, start:stop])
            to_phi = torch.baddbmm(grad_z[:, None], states[:, start:stop], grad_collected.mT)
            grad_k[:, start:stop] = pull(_keep(to_phi, mask, start, stop), None)[0]
            if grad_states is not None:
                grad_states[:, start:stop] = _keep(phi, mask, start, stop) @ grad_collected
        return grad_k, grad_states, None, None


class _Spread(torch.autograd.Function):
    """out_i = sum_h phi(q_ih) G_h / (phi(q_ih) . z_h) + b, for G [B, W, D] and z [B, W]."""

    @staticmethod
    def forward(ctx, q, spread, z, bias, heads, eps, feature_map):
        out = q.new_empty(*q.shape[:2], spread.shape[2])
        bounds = segments(q.shape[1])
        for start, stop in bounds:
            weights, _ = _normalised(feature_map(q[:, start:stop]), z, heads, eps)
            out[:, start:stop] = weights @ spread if bias is None else torch.baddbmm(bias, weights, spread)
        ctx.save_for_backward(q, spread, z, bias)
        ctx.options = bounds, heads, eps, feature_map
        return out

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out):
        q, spread, z, bias = ctx.saved_tensors
        bounds, heads, eps, feature_map = ctx.options
        grad_q, grad_spread, grad_z = torch.empty_like(q), torch.zeros_like(spread), torch.zeros_like(z)
        for start, stop in bounds:
            above = grad_out[:, start:stop]
            phi, _, pull = feature_map.with_pullback(q[:, start:stop])
            weights, inverse = _normalised(phi, z, heads, eps)
            grad_spread.baddbmm_(weights.mT, above)
            to_weights = _by_head(above @ spread.mT, heads)
            # weights = phi / (phi . z): the denominator has the gradient -(to_weights . weights) / (phi . z).
            to_denominator = (to_weights * _by_head(weights, heads)).sum(-1, keepdim=True).mul_(inverse).neg_()
            grad_z += (_by_head(phi, heads) * to_denominator).flatten(2).sum(1)
            to_phi = to_weights.mul_(inverse).addcmul_(to_denominator, _by_head(z[:, None], heads))
            grad_q[:, start:stop] = pull(to_phi.flatten(2), None)[0]
        grad_bias = None if bias is None else grad_out.sum((0, 1))
        return grad_q, grad_spread, grad_z, grad_bias, None, None, None


def _normalised(phi: Tensor, z: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """phi [B, t, W] over its product with z [B, W] within each head, and one over that product [B, t, H, 1]."""
    parts = _by_head(phi, heads)
    products = parts.transpose(1, 2) @ z.view(z.shape[0], heads, -1, 1)  # [B, H, t, 1]
    inverse = inverse_or_zero(guard(products, eps, 0.0)).transpose(1, 2)
    return (parts * inverse).flatten(2), inverse


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def _keep(x: Tensor, mask: Tensor | None, start: int, stop: int) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[:, start:stop, None], 0.0)
