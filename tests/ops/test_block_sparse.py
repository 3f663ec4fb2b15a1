"""The block-sparse engine against the softmax written as loops over the definition of each pattern, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_xformers.ops.block_sparse.attention import block_sparse_attention
from hf_xformers.ops.block_sparse.patterns import band, block_local, causal, strided

from .pattern_cases import CASES


def inputs(length: int, seed: int = 0, batch: int = 2, heads: int = 2, width: int = 4):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, width)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def by_loops(q, k, v, rule, mask=None):
    """o_i = sum over the allowed, real j of softmax(q_i k_j / sqrt(d)) v_j; zero where nothing is allowed."""
    batch, heads, length, width = q.shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                seen = [j for j in range(length) if rule(i, j, length) and (mask is None or mask[b, j])]
                if not seen:
                    rows.append(0 * (q[b, h, 0] + k[b, h, 0] + v[b, h, 0]))  # zero, with zero gradients
                    continue
                scores = torch.stack([(q[b, h, i] * k[b, h, j]).sum() / width**0.5 for j in seen])
                rows.append((torch.softmax(scores, 0)[:, None] * v[b, h, seen]).sum(0))
    return torch.stack(rows).view(batch, heads, length, width)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition_with_its_gradients(name):
    pattern, rule = CASES[name]
    for length in (1, 23):
        tensors = inputs(length, batch=1)
        expected, found = by_loops(*tensors, rule), block_sparse_attention(*tensors, pattern)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        weight = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad((found * weight).sum(), tensors),
            torch.autograd.grad((expected * weight).sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_rows_of_padding(side):
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[0, 14:] = False
    mask[1] = False
    mask = mask if side == "right" else mask.flip(1)
    tensors = inputs(19)
    found = block_sparse_attention(*tensors, band(4, 2), key_padding_mask=mask)
    expected = by_loops(*tensors, lambda i, j, t: i - 4 <= j <= i + 2, mask)
    real = mask[0]
    torch.testing.assert_close(found[0][:, real], expected[0][:, real], atol=1e-10, rtol=1e-10)
    assert torch.count_nonzero(found[1]) == 0
    found.sum().backward()
    assert all(torch.isfinite(t.grad).all() and torch.count_nonzero(t.grad[1]) == 0 for t in tensors)


def test_queries_of_a_cache_stand_at_their_offset():
    q, k, v = inputs(30)
    whole = block_sparse_attention(q, k, v, band(6, 0))
    last = block_sparse_attention(q[:, :, 27:], k, v, band(6, 0), query_offset=27)
    torch.testing.assert_close(last, whole[:, :, 27:])


@pytest.mark.parametrize("name", ["band", "blocks", "strides"])
def test_single_queries_along_a_text(name):
    """Step by step, each with the last keys alone or with all: what is found once serves later steps, and calls that
    record gradients after those that do not; a row of padding alone gives zeros, in the gradient as well."""
    pattern, rule, reach = {
        "band": (band(4, 0), lambda i, j: i - 4 <= j, 4),
        "blocks": (block_local(4, 1), lambda i, j: i // 4 - 1 <= j // 4, 7),
        "strides": (strided(3), lambda i, j: (i - j) % 3 == 0, 14),
    }[name]
    q, k, v = inputs(14)
    real = torch.ones(2, 14, dtype=torch.bool)
    real[1] = False
    masks = (None, real)
    expected = [by_loops(q, k, v, lambda i, j, _: j <= i and rule(i, j), mask) for mask in masks]
    for recorded, (mask, whole) in itertools.product((False, True), zip(masks, expected)):
        for place in range(14):
            for first in {0, max(0, place - reach)}:
                here = slice(first, place + 1)
                where = {"query_offset": place, "key_offset": first, "causal": True}
                where["key_padding_mask"] = None if mask is None else mask[:, here]
                with torch.inference_mode(not recorded):
                    given = q[:, :, place : place + 1], k[:, :, here], v[:, :, here]
                    found = block_sparse_attention(*given, pattern, **where)
                    other, _ = block_sparse_attention(*given, pattern, return_lse=True, **where)
                row = whole[:, :, place : place + 1]
                torch.testing.assert_close(found, row)
                torch.testing.assert_close(other, row)
                if recorded and place in (2, 9):
                    slopes = torch.autograd.grad(found.square().sum(), (q, k, v))
                    by_rule = torch.autograd.grad(row.square().sum(), (q, k, v), retain_graph=True)
                    for slope, wanted in zip(slopes, by_rule):
                        torch.testing.assert_close(slope, wanted)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("hidden", ["nothing", "of rows", "of queries", "keys and side"])
def test_a_few_queries_with_keys_beside(queries, cap, hidden):
    """Four heads over two of keys: one softmax over the window and the side keys, and its denominator."""
    q, k, v = inputs(14, heads=4)
    q, k, v, side_key, side_value = q[:, :, -queries:], k[:, :2], v[:, :2], k[:, 2:, :3], v[:, 2:, :3]
    generator = torch.Generator().manual_seed(1)
    beside = torch.ones(2, queries, 3, dtype=torch.bool)
    real = torch.ones(2, 14, dtype=torch.bool)
    if hidden == "of rows":
        beside = (torch.rand(2, 1, 3, generator=generator) < 0.5).expand(-1, queries, -1)
    elif hidden == "of queries":
        beside = torch.rand(beside.shape, generator=generator) < 0.5
    elif hidden == "keys and side":  # a row reads nothing
        beside[1], real[1], real[0, 12] = False, False, False
    given = {"nothing": None, "of rows": beside[:, 0]}.get(hidden, beside)
    options = {"query_offset": 14 - queries, "causal": True, "score_cap": cap}
    options |= {"side_key": side_key, "side_value": side_value, "side_mask": given}
    options["key_padding_mask"] = real if hidden == "keys and side" else None
    found, lse = block_sparse_attention(q, k, v, band(5, 0), **options, return_lse=True)
    at, of = torch.arange(14 - queries, 14)[:, None], torch.arange(14)
    near = ((of <= at) & (of >= at - 5))[None] & real[:, None]
    mask = torch.cat([near, beside], -1)[:, None]
    keys, values = (torch.cat(pair, 2).repeat_interleave(2, 1) for pair in ((k, side_key), (v, side_value)))
    scores = q @ keys.mT / 2
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = torch.where(mask, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    expected = weights @ values / total.clamp(min=1e-300)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, total[..., 0].log())
    torch.testing.assert_close(block_sparse_attention(q, k, v, band(5, 0), **options), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_single_queries_of_large_norm_in_half_precision(dtype, kv_heads):
    """Scores of thousands: finite, and as near to float64 on the same numbers as rounding the result allows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 600, 16) for heads in (2, kv_heads, kv_heads))
    q, k = (100 * F.normalize(x, dim=-1) for x in (q, k))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for place in (0, 5, 599):
        found = block_sparse_attention(q[:, :, place : place + 1], k, v, band(512, 0), query_offset=place)
        seen = slice(max(0, place - 512), place + 1)
        scores = q[:, :, place : place + 1].double() @ k[:, :, seen].double().mT / 4
        expected = scores.softmax(-1) @ v[:, :, seen].double()
        torch.testing.assert_close(found.double(), expected, atol=8 * torch.finfo(dtype).eps, rtol=0.0)


def test_global_tokens_of_each_example_count_once():
    q, k, v = inputs(21)
    chosen = torch.zeros(2, 21, dtype=torch.bool)
    chosen[0, [0, 7]] = True  # 7 lies inside other tokens' windows
    chosen[1, 3] = True
    found = block_sparse_attention(q, k, v, band(2, 2), global_mask=chosen)
    for row in range(2):
        rule = lambda i, j, t, row=row: abs(i - j) <= 2 or bool(chosen[row, i] | chosen[row, j])  # noqa: E731
        expected = by_loops(q[row : row + 1], k[row : row + 1], v[row : row + 1], rule)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("batch", [1, 2])
def test_grouped_queries_and_a_score_bias(batch):
    q, k, v = inputs(26, batch=batch, heads=4)
    k, v = k[:, :2], v[:, :2]
    slope = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)

    def bias(query_index, key_index):
        distance = (query_index.unsqueeze(-1) - key_index.unsqueeze(-2)).abs()
        return -slope[:, None, None] * distance.unsqueeze(-3)

    found = block_sparse_attention(q, k, v, band(5, 0), score_bias=bias)
    scores = q @ k.repeat_interleave(2, 1).mT / 2 + bias(torch.arange(26), torch.arange(26))
    index = torch.arange(26)
    distance = index[:, None] - index[None]
    weights = torch.softmax(scores.masked_fill((distance < 0) | (distance > 5), -torch.inf), -1)
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((x * probe).sum(), [q, k, v, slope]) for x in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_refusals():
    q, k, v = inputs(8)
    with pytest.raises(TypeError):
        block_sparse_attention(q, k, v, "band")
    with pytest.raises(ValueError):
        block_sparse_attention(q, k[:, :, :, :2], v, causal())
