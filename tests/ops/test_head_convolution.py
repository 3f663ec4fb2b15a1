"""The convolution over heads against its sum, tap by tap, and against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers.ops import head_convolution as module
from hf_xformers.ops.head_convolution import convolve_heads, convolve_heads_reference
from tests.ops.linear_forms import numbers


def by_taps(value, weight):
    """out_t = sum_k w_k value_(t + k - K // 2)"""
    taps, length = weight.shape[1], value.shape[2]
    rows = []
    for t in range(length):
        near = [(k, t + k - taps // 2) for k in range(taps) if 0 <= t + k - taps // 2 < length]
        rows.append(sum(weight[:, k, None] * value[:, :, at] for k, at in near))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("taps", [25, 33, 65])
def test_blocks_equal_the_sum_over_taps(length, taps):
    batch = 1 if (length + taps // 8) % 2 else 3  # each length and each kernel with both
    # Heads beside each other in memory, as a projection leaves them.
    value = numbers(batch, length, 2, 4, seed=1).transpose(1, 2)
    weight = numbers(2, taps, seed=2)
    found, expected = convolve_heads(value, weight), by_taps(value, weight)
    torch.testing.assert_close(convolve_heads_reference(value, weight), expected, atol=1e-12, rtol=1e-12)
    assert "ConvolveHeads" in type(found.grad_fn).__name__
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    probe = numbers(*expected.shape, seed=3).detach()
    ours, theirs = (torch.autograd.grad((x * probe).sum(), (value, weight)) for x in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("taps", [3, 65, 67])
def test_the_literal_form_and_other_kernels_are_torchs(taps):
    value, weight = numbers(2, 3, 80, 4, seed=1), numbers(3, taps, seed=2)
    expected = F.conv2d(value, weight[:, None, :, None], padding=(taps // 2, 0), groups=3)
    for literal in (True, False):
        torch.testing.assert_close(convolve_heads(value, weight, literal), expected, atol=1e-12, rtol=1e-12)
    name = type(convolve_heads(value, weight).grad_fn).__name__
    assert ("ConvolveHeads" in name) == (module.LEAST_TAPS <= taps <= module.BLOCK + 1)


def test_a_second_derivative_needs_the_literal_form():
    value, weight = numbers(1, 1, 9, 2, seed=1), numbers(1, 25, seed=2)
    first = torch.autograd.grad(convolve_heads(value, weight, literal=True).square().sum(), value, create_graph=True)[
        0
    ]
    assert torch.autograd.grad(first.sum(), weight)[0].abs().sum() > 0
    with pytest.raises(RuntimeError, match="no second derivative.*eager"):
        torch.autograd.grad(convolve_heads(value, weight).square().sum(), value, create_graph=True)
