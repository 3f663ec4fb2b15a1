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
@pytest.mark.parametrize(("name", "fields", "learned"), [
    ("layer_norm", {}, ["weight", "bias"]), ("layer_norm", {"bias": False}, ["weight"]),
    ("layer_norm", {"gain": False, "bias": False}, []), ("rms_norm", {}, ["weight"]),
])  # fmt: skip
def test_formula(name, fields, learned, eps):
    module, states = build(name, eps, **fields), vectors()
    assert [part for part, _ in module.named_parameters()] == learned
    gain = module.weight.tolist() if "weight" in learned else [1.0] * WIDTH
    offset = module.bias.tolist() if "bias" in learned else [0.0] * WIDTH
    output = module(states)
    for b in range(3):
        for t in range(4):
            row = states[b, t].tolist()
            mean = sum(row) / WIDTH if name == "layer_norm" else 0.0
            scale = 1 / math.sqrt(sum((x - mean) ** 2 for x in row) / WIDTH + eps)
            expected = [g * (x - mean) * scale + c for x, g, c in zip(row, gain, offset)]
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


def test_no_bias_without_a_gain():
    with pytest.raises(ValueError, match="no bias without a gain"):
        build("layer_norm", gain=False)


def test_width_of_their_own():
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=2)
    for name in ("layer_norm", "rms_norm"):
        assert build_spec("normalization", name).build(config, width=5).weight.shape == (5,)
