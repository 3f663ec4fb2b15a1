"""Norms against their formulas, one vector at a time."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel, build_spec
from tests.helpers import close, make_strong

WIDTH = 12
TINY = dict(vocab_size=20, hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)


def vectors():
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1


def build(name, eps=1e-5, **fields):
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=2, layer_norm_eps=eps)
    return make_strong(build_spec("normalization", {"type": name, **fields}).build(config).double(), amount=0.5)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_layer_norm(eps):
    module, states = build("layer_norm", eps), vectors()
    output = module(states)
    for b in range(3):
        for t in range(4):
            row = states[b, t].tolist()
            mean = sum(row) / WIDTH
            variance = sum((x - mean) ** 2 for x in row) / WIDTH
            expected = [
                float(g) * (x - mean) / math.sqrt(variance + eps) + float(c)
                for x, g, c in zip(row, module.weight.detach(), module.bias.detach())
            ]
            close(output[b, t], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(eps):
    module, states = build("rms_norm", eps), vectors()
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    output = module(states)
    for b in range(3):
        for t in range(4):
            row = states[b, t].tolist()
            scale = 1 / math.sqrt(sum(x * x for x in row) / WIDTH + eps)
            expected = [float(g) * x * scale for x, g in zip(row, module.weight.detach())]
            close(output[b, t], torch.tensor(expected, dtype=torch.float64))


def test_rms_norm_from_zero():
    """The parameter is what is added to 1, and starts at 0."""
    module, states = build("rms_norm", from_zero=True), vectors()
    scale = (states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    close(module(states), states * scale * (1 + module.weight))
    model = XFormerModel(
        XFormerConfig(**TINY, normalization={"type": "rms_norm", "from_zero": True}, residual="pre_ln")
    )
    assert not model.trunk.final_norm.weight.any()
    half = module.bfloat16()(states.bfloat16())
    assert half.dtype == torch.bfloat16
    close(half.double(), module.double()(states.bfloat16().double()), 0.01)


def test_rms_norm_in_bfloat16():
    """The mean square of large numbers is taken in float32: bfloat16 and float16 squares would be lost or overflow."""
    module = build("rms_norm", 1e-6)
    states = vectors() * 300
    expected = module(states)
    for dtype in (torch.bfloat16, torch.float16):
        output = module.to(dtype)(states.to(dtype))
        assert output.dtype == dtype
        assert ((output.double() - expected).abs() <= 4 * torch.finfo(dtype).eps * expected.abs() + 1e-2).all()


def test_without_bias():
    module = build("layer_norm", bias=False)
    assert module.bias is None
    states = vectors()
    centred = states - states.mean(-1, keepdim=True)
    close(module(states), module.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())


def test_without_gain():
    module, states = build("layer_norm", gain=False, bias=False), vectors()
    assert not list(module.parameters())
    centred = states - states.mean(-1, keepdim=True)
    close(module(states), centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
    with pytest.raises(ValueError, match="no bias without a gain"):
        build("layer_norm", gain=False)


def test_width_of_their_own():
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=2)
    for name in ("layer_norm", "rms_norm"):
        assert build_spec("normalization", name).build(config, width=5).weight.shape == (5,)
