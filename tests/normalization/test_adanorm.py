"""AdaNorm against its equation, with the factor held constant in the backward pass."""

import pytest
import torch

from hf_xformers import XFormerConfig
from tests.helpers import close

WIDTH = 7


def build(eps=1e-5, **fields):
    config = XFormerConfig(
        hidden_size=WIDTH, num_attention_heads=1, layer_norm_eps=eps, normalization={"type": "adanorm", **fields}
    )
    return config.normalization.build(config)


def vectors(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def standardised(x, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("k", "scale"), [(0.1, 1.0), (0.3, 2.0), (0, 1)])
def test_formula(k, scale):
    """Forward, and the gradient C (1 - k y) g pushed through the plain norm alone."""
    x, g = vectors(2, 3).requires_grad_(), vectors(2, 3, seed=4)
    output = build(k=k, scale=scale)(x)
    y = standardised(x, 1e-5)
    close(output, scale * (1 - k * y) * y)
    factor = (scale * (1 - k * y)).detach()
    found = torch.autograd.grad((output * g).sum(), x)[0]
    close(found, torch.autograd.grad((y * factor * g).sum(), x, retain_graph=True)[0])
    whole = torch.autograd.grad((scale * (1 - k * y) * y * g).sum(), x)[0]
    assert torch.allclose(found, whole) == (k == 0)


def test_no_parameters_and_a_fixed_mean():
    norm = build(eps=0.0, k=0.2, scale=1.5)
    assert not list(norm.parameters())
    close(norm(vectors(4)).mean(-1), torch.full((4,), -1.5 * 0.2, dtype=torch.float64))
