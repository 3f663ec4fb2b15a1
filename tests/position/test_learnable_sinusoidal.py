"""Sinusoids with learned frequencies, at the input."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.position.sinusoidal_absolute import sinusoids
from tests.helpers import close, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def build(**fields):
    torch.manual_seed(0)
    position = {"type": "learnable_sinusoidal", **fields}
    return XFormerModel(XFormerConfig(**SIZES, position=position)).eval()


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_starts_as_fixed_sinusoids(layout):
    position, positions = build(layout=layout).trunk.position, torch.arange(300)
    found = position.embed(torch.zeros(1, 300, 16), positions)[0]
    close(found, sinusoids(positions, 16, 10000.0, layout), 1e-6)


def test_products_depend_on_distance_only_for_any_frequencies():
    position = build().double().trunk.position
    with torch.no_grad():
        position.frequency.copy_(torch.randn(8, dtype=torch.float64))
    table = position.embed(torch.zeros(1, 40, 16).double(), torch.arange(40))[0]
    products = table @ table.t()
    for distance in (1, 7, 20):
        close(products.diagonal(distance), products[0, distance].expand(40 - distance))


def test_slope_of_a_frequency():
    """d PE(t)[2i] / d omega_i = t cos(omega_i t)."""
    position = build().double().trunk.position
    value = position.embed(torch.zeros(1, 1, 16).double(), torch.tensor([[9]]))[0, 0, 4]
    (slope,) = torch.autograd.grad(value, position.frequency)
    omega = position.frequency[2].detach()
    close(slope[2], 9 * torch.cos(9 * omega))
    assert slope.count_nonzero() == 1


def test_zero_frequencies_are_blind_to_order():
    model, ids = build().double(), tokens(1, 6, high=50)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        assert (model(ids[:, order]).last_hidden_state - model(ids).last_hidden_state[:, order]).abs().max() > 1e-6
        model.trunk.position.frequency.zero_()
        close(model(ids[:, order]).last_hidden_state, model(ids).last_hidden_state[:, order])


def test_half_precision_keeps_far_positions_apart():
    position = build().to(torch.bfloat16).trunk.position
    table = position.embed(torch.zeros(1, 2, 16, dtype=torch.bfloat16), torch.tensor([[1000, 1001]]))[0]
    assert (table[0, :2].float() - table[1, :2].float()).abs().max() > 0.1
