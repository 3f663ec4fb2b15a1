"""Attention over a moving window, in tiles, against the matrix of all scores and against loops."""

import itertools
import math

import pytest
import torch

from hf_xformers.ops.score_terms import window as module
from hf_xformers.ops.score_terms.attention import window_attention
from hf_xformers.ops.score_terms.reference import window_attention_reference
from tests.ops.linear_forms import draw

B, H, D = 2, 3, 4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles with few rows, and several groups of heads."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_ROWS", 4)
    monkeypatch.setattr(module, "_SCORES", 80)


def case(length, keys, distances):
    bias = torch.randn(H, distances, dtype=torch.float64)
    bias[1, : distances // 2] = -math.inf  # one head reads less far
    given = draw(B, H, length, D), draw(B, H, keys, D), draw(B, H, keys, D), bias.requires_grad_(), draw(distances, D)
    return given


def test_reference_one_pair_at_a_time():
    q, k, v, bias, table = (x.detach() for x in case(5, 7, 4))
    for before in (3, 5, 1):
        expected = torch.zeros(B, H, 5, D, dtype=torch.float64)
        for b, h, i in itertools.product(range(B), range(H), range(5)):
            powers = torch.zeros(7, dtype=torch.float64)
            for j in range(7):
                column = before - (i + 2 - j)
                if 0 <= column < 4:
                    powers[j] = torch.exp(q[b, h, i] @ (k[b, h, j] + table[column]) + bias[h, column])
            if powers.sum() > 0:
                expected[b, h, i] = powers / powers.sum() @ v[b, h]
        found = window_attention_reference(q, k, v, bias, table, before)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("length", "keys", "distances", "before"),
    [
        (9, 9, 3, 3),
        (9, 9, 3, 2),
        (8, 8, 9, 4),
        (1, 1, 1, 0),
        (6, 13, 5, 5),
        (3, 3, 2, 8),
        (5, 5, 30, 20),
        (13, 13, 4, 0),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_tiles_and_gradients(length, keys, distances, before, masked):
    relative = masked == ((distances + before) % 2 == 0)  # every size with vectors by distance and without
    *inputs, table = case(length, keys, distances)
    mask = torch.rand(B, 1, length, keys) < 0.6 if masked else None
    leaves = (*inputs, table) if relative else tuple(inputs)
    arguments = (*inputs, table if relative else None, before)
    visible = None if mask is None else lambda rows, columns: mask[:, :, rows, columns]
    found = window_attention(*arguments, visible)
    expected = window_attention_reference(*arguments, visible)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(found)
    pairs = zip(torch.autograd.grad(found, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True)
    for ours, theirs in pairs:
        # The derivative at -inf is a choice of torch's: what is not read has none.
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0), rtol=1e-10, atol=1e-12)


def test_masks_of_heads_and_of_all_rows():
    given = case(9, 9, 5)
    for shape in ((1, 1, 1, 9), (1, H, 9, 9), (B, 1, 1, 9)):
        mask = torch.rand(shape) < 0.5

        def visible(rows, columns, mask=mask):
            return mask[:, :, rows if mask.shape[2] > 1 else slice(None), columns]

        expected = window_attention_reference(*given, 3, visible)
        torch.testing.assert_close(window_attention(*given, 3, visible), expected, rtol=1e-12, atol=1e-12)


def test_what_nobody_reads_does_not_matter():
    """Numbers beyond the window, enormous ones among them, change neither results nor gradients."""
    q, k, v, bias, table = case(12, 12, 3)
    (first,) = torch.autograd.grad(window_attention(q, k, v, bias, table, 3)[:, :, 8:].square().sum(), q)
    far = torch.arange(12)[:, None] < 5
    k2, v2 = (torch.where(far, 1e30, x) for x in (k, v))
    output = window_attention(q, k2, v2, bias, table, 3)
    torch.testing.assert_close(output[:, :, 8:], window_attention(q, k, v, bias, table, 3)[:, :, 8:], rtol=0, atol=0)
    assert torch.equal(torch.autograd.grad(output[:, :, 8:].square().sum(), q)[0], first)


def test_dropout_is_the_same_in_the_backward_pass():
    """Values enter linearly: the sum of gradient times value is the output, with whatever has been dropped."""
    q, k, v, bias, table = case(5, 6, 5)
    output = window_attention(q, k, v, bias, table, 4, None, 0.4)
    (slope,) = torch.autograd.grad(output.sum(), v, retain_graph=True)
    torch.testing.assert_close((slope * v).sum(), output.sum())

    def again(q):
        torch.manual_seed(3)
        return window_attention(q, k, v, bias.detach(), table, 4, None, 0.4)

    assert torch.autograd.gradcheck(again, (q,))
    assert not torch.equal(output, window_attention(q, k, v, bias, table, 4, None, 0.4))


def test_half_precision_is_computed_in_float32():
    given = [x.detach().bfloat16().requires_grad_() for x in case(9, 9, 5)]
    output = window_attention(*given, 4)
    assert output.dtype == torch.bfloat16
    expected = window_attention_reference(*(x.double() for x in given), 4)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)
    assert [x.dtype for x in torch.autograd.grad(output.float().sum(), given)] == [torch.bfloat16] * 5


def test_refusals():
    q, k, v, bias, table = case(5, 7, 4)
    for arguments, message in (
        ((k, q, v, bias, table), "at least as many keys"),
        ((q, k, v[:, :, 1:], bias, table), "value .2, 3, 6, 4. must be"),
        ((q, k, v, bias[1:], table), r"bias \(2, 4\) and table \(4, 4\) must be \[3, n\]"),
        ((q, k, v, bias, table[1:]), r"table \(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            window_attention(*arguments, 3)
