"""Rotary positions against rotations by complex numbers, and through a whole model."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, build_spec
from hf_xformers.position.rotary import RotaryPosition
from tests.helpers import close, make_strong, tokens

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
def test_scores_depend_on_distance(layout):
    """q_m . k_n is a function of m - n, and not a constant one."""
    query, key = vectors(1, 1, 1, WIDTH), vectors(1, 1, 1, WIDTH, seed=1)

    def score(m, n):
        turn = [rotation(torch.tensor([[t]]), layout=layout) for t in (m, n)]
        return float((turn[0](query) * turn[1](key)).sum())

    for shift in (1, 10, 100):
        assert abs(score(5 + shift, 2 + shift) - score(5, 2)) < 1e-4
    assert abs(score(5, 2) - score(2, 5)) > 1e-3 and abs(score(5, 2) - score(6, 2)) > 1e-3


def test_layouts_are_equivalent():
    """Half rotation of permuted channels is interleaved rotation, permuted."""
    positions, heads = torch.arange(6)[None], vectors(2, 3, 6, WIDTH)
    order = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]
    close(
        rotation(positions, layout="half")(heads[..., order]),
        rotation(positions, layout="interleaved")(heads)[..., order],
        1e-12,
    )


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


def build(**fields):
    config = XFormerConfig(
        vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16,
        max_position_embeddings=4, position={"type": "rotary", **fields},
    )  # fmt: skip
    torch.manual_seed(0)
    return make_strong(XFormerForCausalLM(config).double().eval())


@pytest.mark.parametrize("fields", [{}, {"layout": "interleaved"}, {"fraction": 0.5}], ids=str)
def test_model_sees_distances_only(fields):
    """Positions that all move by the same amount change nothing; other gaps do. There is no longest text."""
    model, ids = build(**fields), tokens(2, 9, high=40)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        close(model(ids, position_ids=positions + 37, use_cache=False).logits, expected, 1e-4)
        stretched = model(ids, position_ids=positions * 2, attention_mask=torch.ones_like(ids), use_cache=False).logits
        assert (stretched - expected).abs().max() > 1e-4


def test_values_are_not_rotated():
    """One token attends to itself alone, so its position cannot matter."""
    model = build()
    with torch.no_grad():
        one = [model(torch.tensor([[7]]), position_ids=torch.tensor([[t]])).logits for t in (0, 25)]
    close(*one)
