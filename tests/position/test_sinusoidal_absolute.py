"""Sinusoids, fixed and learnable, against their closed form, one number at a time."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.position.sinusoidal_absolute import sinusoids
from tests.helpers import close, tokens

WIDTH = 16


def closed_form(position, width=WIDTH, base=10000.0, layout="interleaved"):
    """Vaswani et al. 2017, section 3.5."""
    row = [0.0] * width
    for i in range(width // 2):
        angle = position / base ** (2 * i / width)
        where = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, width // 2 + i)
        row[where[0]], row[where[1]] = math.sin(angle), math.cos(angle)
    return row


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_closed_form(layout, base):
    positions = torch.tensor([0, 1, 2, 17, 511])
    table = sinusoids(positions, WIDTH, base, layout)
    expected = torch.tensor([closed_form(int(t), base=base, layout=layout) for t in positions])
    # An angle of t radians is known to half a unit in its last place or two: t * 2^-23.
    close(table.double(), expected.double(), 511 * 2**-23)
    close(table[0].double(), expected[0].double(), 1e-12)


@pytest.mark.parametrize("offset", [0, 2])
def test_model_adds_it(offset):
    """x_t = sqrt(D) E[w_t] + PE(t + offset), counted from the first real token; nothing is learned."""
    config = XFormerConfig(
        vocab_size=30,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=4,  # no limit for sinusoids
        position={"type": "sinusoidal_absolute", "offset": offset},
        embedding={"type": "token", "scale": True},
    )
    model = XFormerModel(config).double().eval()
    assert not list(model.trunk.position.parameters()) and not list(model.trunk.position.buffers())
    ids = tokens(1, 9, high=30)
    with torch.no_grad():
        vectors = model.get_input_embeddings().weight[ids[0]] * math.sqrt(WIDTH)
        output = model(ids, output_hidden_states=True).hidden_states[0][0]
        table = torch.tensor([closed_form(t + offset) for t in range(9)], dtype=torch.float64)
        close(output, vectors + table, 1e-5)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
        output = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[0][0, 2:7]
        close(output, vectors[2:7] + table[:5], 1e-5)


def test_bfloat16_keeps_positions_apart():
    """Angles are not rounded to the model's precision: bfloat16 knows 641 of the first 2048 integers."""
    config = XFormerConfig(
        vocab_size=30, hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=1, position="sinusoidal_absolute"
    )
    model = XFormerModel(config).to(torch.bfloat16).eval()
    zeros = torch.zeros(1, 2048, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        output = model(inputs_embeds=zeros, output_hidden_states=True).hidden_states[0][0].float()
    expected = torch.tensor([closed_form(t) for t in range(2048)])
    assert (output - expected).abs().max() < 2**-8


# ------------------------------------------------------------------------------------------- with learned frequencies


def learnable(**fields):
    position = {"type": "learnable_sinusoidal", **fields}
    config = XFormerConfig(
        vocab_size=30, hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=1, position=position
    )
    return XFormerModel(config).trunk.position


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_learnable_ones_start_as_fixed_ones(layout):
    found = learnable(layout=layout).embed(torch.zeros(1, 300, WIDTH), torch.arange(300))[0]
    close(found, sinusoids(torch.arange(300), WIDTH, 10000.0, layout), 1e-6)


def test_learnable_ones_keep_far_positions_apart_in_half_precision():
    zeros = torch.zeros(1, 2, WIDTH, dtype=torch.bfloat16)
    table = learnable().to(torch.bfloat16).embed(zeros, torch.tensor([[1000, 1001]]))[0].float()
    assert (table[0, :2] - table[1, :2]).abs().max() > 0.1
