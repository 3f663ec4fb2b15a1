"""Dynamic tanh against its equation."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.weight_decay import declared_undecayed
from tests.helpers import close

SIZES = dict(
    vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, residual="pre_ln"
)


@pytest.mark.parametrize("bias", [True, False])
def test_formula(bias):
    config = XFormerConfig(**SIZES, normalization={"type": "dynamic_tanh", "alpha": 0.7, "bias": bias})
    norm, generator = config.normalization.build(config).double(), torch.Generator().manual_seed(0)
    norm.initialize(config, torch.nn.init)
    assert norm.alpha.item() == pytest.approx(0.7) and (norm.weight == 1).all()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    output = norm(x)
    for place in range(8):
        alpha, w, b = norm.alpha.item(), norm.weight[place].item(), norm.bias[place].item() if bias else 0.0
        expected = [w * math.tanh(alpha * v) + b for v in x[..., place].flatten().tolist()]
        close(output[..., place].flatten(), torch.tensor(expected, dtype=torch.float64))
    torch.autograd.gradcheck(norm, (x.requires_grad_(),))


def test_nothing_of_it_decays():
    model = XFormerForCausalLM(XFormerConfig(**SIZES, normalization="dynamic_tanh"))
    kept = {name for name in declared_undecayed(model) if "norm" in name}
    assert len(kept) == 2 * (2 * SIZES["num_hidden_layers"] + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_states(dtype):
    config = XFormerConfig(**SIZES, normalization="dynamic_tanh")
    norm = config.normalization.build(config).to(dtype)
    output = norm(torch.full((3, 8), 6e4, dtype=dtype))
    assert output.dtype == dtype and (output == 1).all()
