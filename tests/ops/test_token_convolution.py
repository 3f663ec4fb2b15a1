"""Convolutions over tokens with kernels by head: against a loop, in half precision, and their derivatives."""

import pytest
import torch

from hf_xformers.ops.convolution.convolution import token_convolution, token_convolution_reference
from tests.helpers import close


def given(batch=2, length=5, heads=2, channels=6, taps=4, dtype=torch.float64, dynamic=True):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length, heads, taps) if dynamic else (heads, taps)
    inputs = torch.randn(batch, length + taps - 1, channels, generator=generator, dtype=torch.float64)
    kernel = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs.to(dtype).requires_grad_(), kernel.to(dtype).requires_grad_()


@pytest.mark.parametrize(("taps", "heads"), [(1, 1), (4, 2), (3, 6)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_by_loop(taps, heads, dynamic):
    inputs, kernel = given(taps=taps, heads=heads, dynamic=dynamic)
    expected = torch.zeros(2, 5, 6, dtype=torch.float64)
    for b in range(2):
        for t in range(5):
            for c in range(6):
                own = (kernel[b, t] if dynamic else kernel)[c // (6 // heads)]
                expected[b, t, c] = sum(own[j] * inputs[b, t + j, c] for j in range(taps))
    every = kernel.expand(2, 5, heads, taps)
    slopes = []
    for found in (token_convolution(inputs, kernel), token_convolution_reference(inputs, every)):
        close(found, expected)
        slopes.append(torch.autograd.grad(found.sin().sum(), (inputs, kernel)))
    for one, other in zip(*slopes, strict=True):
        close(one, other)


def test_half_precision_and_refusals():
    inputs, kernel = given(taps=31, length=40, dtype=torch.bfloat16)
    exact = token_convolution_reference(inputs.double(), kernel.double())
    gap = (token_convolution(inputs, kernel).double() - exact).abs()
    assert gap.max() <= exact.abs().max() * 2**-8  # one rounding, at the end
    with pytest.raises(ValueError, match="heads and 4 tokens or more"):
        token_convolution(torch.zeros(1, 2, 6), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="channels in 5 heads"):
        token_convolution(torch.zeros(1, 4, 6), torch.zeros(5, 4))
    inputs, kernel = given()
    (slope,) = torch.autograd.grad(token_convolution(inputs, kernel).sin().sum(), inputs)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_convolution(inputs, kernel).sin().sum(), inputs, create_graph=True)
    assert slope.shape == inputs.shape
