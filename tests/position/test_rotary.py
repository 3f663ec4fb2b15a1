"""Rotary positions against rotations by complex numbers."""

import pytest
import torch

from hf_xformers import XFormerConfig, build_spec
from hf_xformers.position.rotary import RotaryPosition
from tests.helpers import close

WIDTH = 8


def rotation(positions, width=WIDTH, dtype=torch.float64, **fields):
    module = RotaryPosition(width, build_spec("position", {"type": "rotary", **fields}))
    return module.rotation(positions, torch.zeros(1, dtype=dtype))


def by_complex_numbers(heads, positions, theta=10000.0, layout="half", width=WIDTH):
    """Su et al. 2021, eq. 34: pair i, read as a complex number, times exp(i * t * theta^(-2i/width))."""
    result = heads.clone()
    for i in range(width // 2):
        real, imaginary = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
        angle = positions.double() * theta ** (-2 * i / width)
        turned = torch.complex(heads[..., real], heads[..., imaginary]) * torch.polar(torch.ones_like(angle), angle)
        result[..., real], result[..., imaginary] = turned.real, turned.imag
    return result


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("theta", [10000.0, 100])
def test_equation(layout, theta):
    positions = torch.tensor([[0, 1, 2, 9, 100], [3, 3, 0, 50, 7]])
    heads = vectors(2, 3, 5, WIDTH)
    turned = rotation(positions, layout=layout, theta=theta)(heads)
    expected = by_complex_numbers(heads, positions[:, None], theta, layout)
    close(turned, expected, 100 * 2**-22)
    close(turned.norm(dim=-1), heads.norm(dim=-1), 1e-5)
    close(rotation(torch.zeros(1, 5, dtype=torch.long), layout=layout)(heads), heads, 1e-12)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fraction(layout):
    """The rest of each head passes as it is; the rotated part is what a narrower head would get."""
    positions, heads = torch.arange(6)[None], vectors(2, 3, 6, WIDTH)
    turned = rotation(positions, width=4, layout=layout)(heads)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    close(turned[..., :4], by_complex_numbers(heads[..., :4], positions, layout=layout, width=4), 1e-5)
    config = XFormerConfig(
        hidden_size=32, num_attention_heads=4, position={"type": "rotary", "fraction": 0.5, "layout": layout}
    )
    assert config.position.build(config).width == 4


def test_far_positions_in_bfloat16():
    """Angles stay in float32: neighbours beyond position 256 differ."""
    turn = rotation(torch.tensor([[300, 301]]), dtype=torch.bfloat16)
    assert turn.cos.dtype == torch.bfloat16
    expected = torch.tensor([300.0, 301.0], dtype=torch.float64).cos()
    assert (turn.cos[0, 0, :, 0].double() - expected).abs().max() < 2**-8
