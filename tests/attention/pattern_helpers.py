"""What the tests of attention over fixed patterns share: the equation with its sets of keys written as loops."""

from __future__ import annotations

import torch

from tests.attention.score_helpers import make_context, run_layers, softmax_by_rows, split_heads, vectors

SIDES = ("none", "right", "left", "empty")


def pad_mask(length, real, side):
    """[B, T] masks of one full row and one with `real` tokens (or none)."""
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1] = False
    if side != "empty":
        mask[1, slice(0, real) if side == "right" else slice(length - real, length)] = True
    return mask


def allowed_by(reads, length, heads, causal, mask=None):
    """[B, H, T, T] boolean: `reads(i, j, head, n)` for positions counted from the first real token of n real ones."""
    masks = torch.ones(1, length, dtype=torch.bool) if mask is None else mask
    allowed = torch.zeros(masks.shape[0], heads, length, length, dtype=torch.bool)
    for row, real in enumerate(masks):
        where = real.nonzero().flatten().tolist()
        for head in range(heads):
            for a in where:
                for b in where:
                    i, j = a - where[0], b - where[0]
                    allowed[row, head, a, b] = reads(i, j, head, len(where)) and not (causal and j > i)
    return allowed


@torch.no_grad()
def by_hand(layer, states, allowed, bias=0.0):
    """softmax over the allowed keys with exponentials written out -> output, weights."""
    q, k, v = (split_heads(part(states), layer.head_dim) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v = (x.repeat_interleave(layer.num_key_value_groups, 1) for x in (k, v))
    weights = softmax_by_rows(q @ k.transpose(2, 3) * layer.head_dim**-0.5 + bias, allowed)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def check_against_loops(layer, reads, length, causal, real=None):
    """Both paths against the loops, for padding on either side, with values and gradients of the real tokens."""
    states = vectors(2, length)
    for side in SIDES:
        mask = pad_mask(length, real or length - 4, side)
        allowed = allowed_by(reads, length, layer.num_heads, causal, mask)
        expected, weights = by_hand(layer, states, allowed)
        kept = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
        found = {}
        for implementation in ("eager", "sdpa"):
            given = states.clone().requires_grad_()
            context = make_context(length, causal, padding_mask=mask, implementation=implementation)
            (result,) = run_layers([layer], given, context)
            torch.testing.assert_close(result.output.detach()[kept], expected[kept], rtol=1e-9, atol=1e-9)
            if implementation == "eager":
                at = kept[:, :, None, None].expand(-1, -1, layer.num_heads, length)
                torch.testing.assert_close(
                    result.weights.detach().transpose(1, 2)[at], weights.transpose(1, 2).expand_as(at)[at]
                )
            (found[implementation],) = torch.autograd.grad(result.output[kept].sin().sum(), given)
            assert found[implementation].isfinite().all()
        torch.testing.assert_close(found["sdpa"], found["eager"], rtol=1e-8, atol=1e-9)
