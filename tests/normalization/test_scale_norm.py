"""ScaleNorm, FixNorm and SmallInit against their equations."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from tests.helpers import close, make_strong

WIDTH = 8
SIZES = dict(
    vocab_size=20,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    initializer="small",
    embedding="fix_norm",
    normalization="scale_norm",
    residual="pre_ln",
    head="fix_norm",
)


def build():
    config = XFormerConfig(**SIZES)
    return config.normalization.build(config).double()


def vectors(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model():
    torch.manual_seed(0)
    return make_strong(XFormerForCausalLM(XFormerConfig(**SIZES)).double().eval())


def test_formula():
    norm, x = build(), vectors(2, 3)
    with torch.no_grad():
        norm.weight.fill_(1.7)
    output = norm(x)
    for b in range(2):
        for t in range(3):
            length = sum(float(value) ** 2 for value in x[b, t]) ** 0.5
            close(output[b, t], 1.7 * x[b, t] / length)
    close(output.norm(dim=-1), torch.full((2, 3), 1.7, dtype=torch.float64))
    close(norm(4 * x), output)
    torch.autograd.gradcheck(norm, (x.requires_grad_(),))


def test_starts_as_rms_norm():
    norm, x = build(), vectors(5)
    norm.initialize(XFormerConfig(**SIZES), torch.nn.init)
    close(norm(x), torch.nn.functional.rms_norm(x, (WIDTH,), eps=0.0), 1e-7)


def test_fix_norm():
    """The table's lengths matter nowhere; the two uses of a vector, by formula."""
    net, ids = model(), torch.randint(0, 20, (2, 5))
    tower, table = net.model.trunk, net.model.trunk.embedding.tokens.weight
    before = net(ids).logits
    unit = table / table.norm(dim=-1, keepdim=True)
    states = tower.embedding(table[ids], None, torch.arange(5)[None], tower.position)
    close(states, WIDTH**0.5 * unit[ids] + tower.position.table.weight[:5])
    close(before, net.model(ids).last_hidden_state @ unit.T)
    close(net(inputs_embeds=table[ids]).logits, before)
    with torch.no_grad():
        table.mul_(torch.rand(20, 1, dtype=torch.float64) + 0.5)
    close(net(ids).logits, before)


def test_start():
    """Small token vectors, and a scale of sqrt(D)."""
    torch.manual_seed(0)
    net = XFormerForCausalLM(XFormerConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 192, "vocab_size": 50}))
    assert net.model.trunk.embedding.tokens.weight.abs().max() <= 0.01
    close(net.model.trunk.final_norm.weight, torch.tensor([8.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision(dtype):
    norm = build().to(dtype)
    output = norm((300 * vectors(3)).to(dtype))  # whose squares overflow half precision
    assert output.dtype == dtype and output.isfinite().all()
