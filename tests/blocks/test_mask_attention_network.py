"""Dynamic mask attention and the mask attention network: the multiplicative definition and the order."""

import pytest
import torch

from hf_xformers import XFormerConfig
from tests.attention.score_helpers import build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()


def layer(causal=False, relu=True, distance=3):
    return build_layers({"type": "dynamic_mask", "relu": relu, "max_distance": distance}, causal=causal)[0]


def by_definition(module, states, mask, causal):
    """M times the exponential of scores, divided by its sum: a loop over pairs."""
    query, key, value = (
        split_heads(projection(states), 4) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    batch, heads, length, width = query.shape
    rows, factors = [], torch.zeros(batch, heads, length, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                total = torch.zeros(width, dtype=torch.float64)
                mass = torch.zeros((), dtype=torch.float64)
                for j in range(i + 1 if causal else length):
                    if not mask[b, j]:
                        continue
                    away = min(abs(i - j), module.distances.shape[1])
                    number = module.distances[0 if j < i else 1, away - 1] if away else 0.0
                    gate = states[b, i] @ module.query_gate.weight[0] + number + module.head_offset[h]
                    factor = 1 / (1 + torch.exp(-gate))
                    factors[b, h, i, j] = factor.detach()
                    power = factor * torch.exp(query[b, h, i] @ key[b, h, j] * width**-0.5)
                    total, mass = total + power * value[b, h, j], mass + power
                rows.append(total / mass if mass > 0 else total)
    joined = torch.stack(rows).view(batch, heads, length, width).transpose(1, 2).flatten(2)
    return module.o_proj(joined.relu() if module.spec.relu else joined), factors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_multiplicative_definition(causal, relu):
    """Both paths, distances beyond the table, and gradients of every parameter."""
    module, states = layer(causal, relu), vectors(2, 7)
    expected, _ = by_definition(module, states, REAL, causal)
    slopes = []
    for wanted in (False, True):
        context = make_context(7, causal, padding_mask=REAL, output_attentions=wanted)
        (found,) = run_layers([module], states, context)
        close(found.output[REAL], expected[REAL])
        slopes.append(torch.autograd.grad(found.output[REAL].sin().sum(), list(module.parameters())))
    reference = torch.autograd.grad(expected[REAL].sin().sum(), list(module.parameters()))
    for own, other, third in zip(*slopes, reference, strict=True):
        close(own, other)
        close(own, third)


def config(**fields):
    block = {"type": "mask_attention_network", "max_distance": 4, **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def test_order_of_sublayers():
    """x + DMAN(n(x)), then attention, then the feed-forward."""
    made = config()
    plan = made.block.build(made, layer_idx=0).plan
    assert [entry.name for entry in plan] == ["dynamic_mask", "attention", "feedforward"]
