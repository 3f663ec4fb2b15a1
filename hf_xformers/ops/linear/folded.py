# SPDX-License-Identifier: Apache-2.0
"""Bidirectional linear attention with the projections of values and outputs folded into its sums.

With features phi(x) = elu(x) + 1 of H heads, as wide as they are, and states x_j of which the values W_v x_j + b_v are
made,

    S = sum_j phi(k_j)^T v_j  =  (sum_j phi(k_j)^T x_j) W_v^T + z^T b_v,      z = sum_j phi(k_j)
    out_i = W_o [all heads] + b_o  =  sum_h phi(q_ih) / (phi(q_ih) . z_h) (S_h W_oh^T) + b_o

so neither values nor the outputs of heads are made for single tokens: two products over the text stand where there
were four. This saves arithmetic in texts longer than the states are wide. The function is that of Katharopoulos et al.
2020 (arXiv 2006.16236), eqs. 4-7; the order of its products is ours.

Names: D width of the states, F of a head, W = H F features of all heads, side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.exponential import exp_
from ..common.padding import check_padding_mask
from ..common.segments import segments
from .feature_maps import relative_elu
from .kernels import inverse_or_zero


class FoldedSums(NamedTuple):
    """What keys leave of a text: S [B, H, F, d_v] and z [B, W]."""

    kv: Tensor
    z: Tensor


def folded_sums(
    key: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    key_padding_mask: Tensor | None = None,
) -> FoldedSums:
    """The sums over a text, without its values.

    Args:
        key: `[B, H, S, F]`; without a copy where the heads of a token lie side by side, as projections leave them.
        states: `[B, S, D]`, of which the values are projected.
        weight, bias: of that projection, `[H d_v, D]` and `[H d_v]` (or None).
        key_padding_mask: `[B, S]`, True = real token.

    Raises:
        ValueError: a mask that is not `[B, S]`.
    """
    heads = key.shape[1]
    check_padding_mask(key_padding_mask, key.shape[0], key.shape[2])
    collected, z = _Collect.apply(_side_by_side(key), states, key_padding_mask)
    kv = _by_head(collected.mT, heads).permute(0, 2, 3, 1) @ _by_head(weight.mT, heads).permute(1, 0, 2)
    if bias is not None:
        kv = kv + _by_head(z, heads)[..., None] * _by_head(bias, heads)[:, None]
    return FoldedSums(kv, z)


def read_folded_sums(
    query: Tensor, sums: FoldedSums, weight: Tensor, bias: Tensor | None, *, eps: float = 0.0
) -> Tensor:
    """What queries `[B, H, T, F]` read of sums, projected by weight `[D, H d_v]` and bias `[D]` (or None) -> the
    outputs of all heads together, `[B, T, D]`.

    A query that sees no key gets the bias. eps: added to the denominator.
    """
    heads, each = sums.kv.shape[1], sums.kv.shape[3]
    spread = sums.kv @ weight.view(-1, heads, each).permute(1, 2, 0)  # [B, H, F, D]
    return _Spread.apply(_side_by_side(query), spread.flatten(1, 2), sums.z, bias, heads, eps)


class _Collect(torch.autograd.Function):
    """sum_j phi(k_j)^T x_j [B, W, D] and sum_j phi(k_j) [B, W]. Keeps phi, which tells its own slope, and not k."""

    @staticmethod
    def forward(ctx, k, states, mask):
        features, ones = torch.empty_like(k), k.new_ones(k.shape[0], 1, k.shape[1])
        collected, z = k.new_zeros(k.shape[0], k.shape[2], states.shape[2]), k.new_zeros(k.shape[0], 1, k.shape[2])
        bounds = segments(k.shape[1], k)
        for start, stop in bounds:
            phi = _features(k[:, start:stop], features[:, start:stop])
            if mask is not None:
                phi.masked_fill_(~mask[:, start:stop, None], 0.0)
            collected.baddbmm_(phi.mT, states[:, start:stop])
            z.baddbmm_(ones[..., start:stop], phi)
        ctx.save_for_backward(features, states)
        ctx.bounds = bounds
        return collected, z[:, 0]

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_collected, grad_z):
        features, states = ctx.saved_tensors
        grad_k, grad_states = torch.empty_like(features), torch.empty_like(states) if ctx.needs_input_grad[1] else None
        for start, stop in ctx.bounds:
            phi, part = features[:, start:stop], grad_k[:, start:stop]
            if grad_states is not None:
                torch.bmm(phi, grad_collected, out=grad_states[:, start:stop])
            to_phi = torch.baddbmm(grad_z[:, None], states[:, start:stop], grad_collected.mT)
            torch.clamp(phi, max=1.0, out=part).mul_(to_phi)
        return grad_k, grad_states, None


class _Spread(torch.autograd.Function):
    """out_i = sum_h w_ih G_h + b with weights w_ih = phi(q_ih) / (phi(q_ih) . z_h), for G [B, W, D] and z [B, W].

    Keeps the weights and not q. With m the inverse denominator, the slope of a feature times m is min(w, m).
    """

    @staticmethod
    def forward(ctx, q, spread, z, bias, heads, eps):
        weights, out = torch.empty_like(q), q.new_empty(*q.shape[:2], spread.shape[2])
        blocks = _blocks(z, heads)
        inverse = q.new_empty(*q.shape[:2], heads)
        bounds = segments(q.shape[1], q)
        for start, stop in bounds:
            part, target = weights[:, start:stop], out[:, start:stop]
            if eps:
                _features(q[:, start:stop], part)
                inverse[:, start:stop] = inverse_or_zero(part @ blocks + eps)
                _by_head(part, heads).mul_(inverse[:, start:stop, :, None])
            else:
                # Relative to the largest feature of a head, which cancels: those of large negative numbers would
                # underflow.
                rows = _by_head(q[:, start:stop], heads)
                _by_head(part, heads).copy_(relative_elu(rows))
                own = inverse_or_zero(part @ blocks)
                _by_head(part, heads).mul_(own[..., None])
                inverse[:, start:stop] = own / (rows.amax(-1).clamp(min=0.0) + 1.0)
            torch.bmm(part, spread, out=target)
            if bias is not None:
                target += bias
        ctx.save_for_backward(weights, inverse, spread, blocks, bias)
        ctx.options = bounds, heads
        return out

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out):
        weights, inverse, spread, blocks, bias = ctx.saved_tensors
        bounds, heads = ctx.options
        grad_q, grad_spread, grad_blocks = (
            torch.empty_like(weights),
            torch.zeros_like(spread),
            torch.zeros_like(blocks),
        )
        for start, stop in bounds:
            above, part, target = grad_out[:, start:stop], weights[:, start:stop], grad_q[:, start:stop]
            grad_spread.baddbmm_(part.mT, above)
            to_weights = above @ spread.mT
            # Through the denominators, which all features of a head share.
            joint = _by_head(torch.mul(to_weights, part, out=target), heads).sum(-1)
            grad_blocks.baddbmm_(part.mT, joint, alpha=-1)
            to_weights.baddbmm_(joint, blocks.mT, alpha=-1)
            torch.minimum(_by_head(part, heads), inverse[:, start:stop, :, None], out=_by_head(target, heads))
            target.mul_(to_weights)
        grad_z = _by_head(grad_blocks.mT, heads).diagonal(dim1=1, dim2=2).mT.flatten(1)
        return grad_q, grad_spread, grad_z, None if bias is None else grad_out.sum((0, 1)), None, None


def _features(x: Tensor, out: Tensor) -> Tensor:
    """elu(x) + 1, into `out`."""
    exp_(torch.clamp(x, max=0.0, out=out))
    return out.add_(x.clamp(min=0.0))


def _blocks(z: Tensor, heads: int) -> Tensor:
    """z [B, W] -> [B, W, H], each head's part in its column: one product then gives the denominators of all heads."""
    own = torch.eye(heads, dtype=z.dtype, device=z.device)[:, None]
    return (_by_head(z, heads)[..., None] * own).flatten(1, 2)


def _side_by_side(x: Tensor) -> Tensor:
    """[B, H, T, F] -> [B, T, W]"""
    return x.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))
