"""Heads joined by routing: loops over capsules, limits, and half precision."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.shared import routed_heads
from hf_xformers.ops.capsule_routing import agreement_routing, em_routing, squash
from tests.attention.score_helpers import GEOMETRY, HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close

AGGREGATIONS = {
    "simple": {"type": "routing_aggregation", "layers": "all"},
    "em": {
        "type": "routing_aggregation",
        "routing": "em",
        "layers": "all",
        "em_lambda": 0.3,
        "num_output_capsules": 8,
    },
    "dynamic": {"type": "capsule_heads"},
    "dynamic_bare": {"type": "capsule_heads", "final_linear": False, "num_output_capsules": 2, "iterations": 2},
    "capsule_em": {"type": "capsule_heads", "routing": "em", "em_lambda": 0.3},
}


def some_votes(tokens=3, inputs=4, outputs=5, width=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, inputs, outputs, width, generator=generator, dtype=torch.float64)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def agreement_by_loops(votes, iterations, squashed):
    """One token's votes, lists of lists of vectors -> output capsules."""
    inputs, outputs, width = len(votes), len(votes[0]), len(votes[0][0])
    logits = [[0.0] * outputs for _ in range(inputs)]
    for _ in range(iterations):
        coupling = [[math.exp(b) / sum(map(math.exp, row)) for b in row] for row in logits]
        found = []
        for o in range(outputs):
            total = [sum(coupling[i][o] * votes[i][o][w] for i in range(inputs)) for w in range(width)]
            if squashed:
                square = dot(total, total)
                total = [x * square / (1 + square) / math.sqrt(square) for x in total]
            else:
                total = [x / sum(coupling[i][o] for i in range(inputs)) for x in total]
            found.append(total)
        for i in range(inputs):
            for o in range(outputs):
                logits[i][o] += dot(found[o], votes[i][o])
    return found


def em_by_loops(votes, iterations, beta_u, beta_a, sharpness):
    inputs, outputs, width = len(votes), len(votes[0]), len(votes[0][0])
    shares = [[1 / outputs] * outputs for _ in range(inputs)]
    for _ in range(iterations):
        means, variances, active = [], [], []
        for o in range(outputs):
            amount = sum(shares[i][o] for i in range(inputs))
            mean = [sum(shares[i][o] * votes[i][o][w] for i in range(inputs)) / amount for w in range(width)]
            away = [[(votes[i][o][w] - mean[w]) ** 2 for w in range(width)] for i in range(inputs)]
            variance = [1e-6 + sum(shares[i][o] * away[i][w] for i in range(inputs)) / amount for w in range(width)]
            cost = sum((beta_u[o] + 0.5 * math.log(v)) * amount for v in variance)
            means.append(mean), variances.append(variance)
            active.append(1 / (1 + math.exp(-sharpness * (beta_a[o] - cost))))
        for i in range(inputs):
            joint = []
            for o in range(outputs):
                density = 1.0
                for w in range(width):
                    gap = votes[i][o][w] - means[o][w]
                    density *= math.exp(-0.5 * gap**2 / variances[o][w]) / math.sqrt(2 * math.pi * variances[o][w])
                joint.append(active[o] * density)
            shares[i] = [value / sum(joint) for value in joint]
    return [[active[o] * x for x in means[o]] for o in range(outputs)]


@pytest.mark.parametrize("squashed", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_agreement(iterations, squashed):
    votes = some_votes()
    expected = [agreement_by_loops(token.tolist(), iterations, squashed) for token in votes]
    close(agreement_routing(votes, iterations, squashed), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("iterations", [1, 3])
def test_expectation_maximisation(iterations):
    votes = some_votes()
    betas = torch.linspace(-0.5, 0.5, 5).double(), torch.linspace(1, -1, 5).double()
    expected = [em_by_loops(token.tolist(), iterations, *(b.tolist() for b in betas), 0.4) for token in votes]
    close(em_routing(votes, iterations, *betas, 0.4), torch.tensor(expected, dtype=torch.float64), 1e-8)


def test_limits():
    votes = some_votes()
    close(agreement_routing(votes, 1, False), votes.mean(1))
    close(agreement_routing(votes, 1, True), squash(votes.sum(1) / 5))
    same = votes[:, :1].expand(-1, 4, -1, -1)
    close(agreement_routing(same, 3, False), same[:, 0])  # votes that agree are a fixed point
    zeros = torch.zeros(5, dtype=torch.float64)
    equal = same.clone().requires_grad_()
    found = em_routing(equal, 3, zeros, zeros, 0.01)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(equal.grad).all()
    order = torch.tensor([2, 0, 3, 1])
    for route in (lambda v: agreement_routing(v, 3, True), lambda v: em_routing(v, 3, zeros, zeros, 0.2)):
        close(route(votes[:, order]), route(votes))  # whose vote it is does not count
    long = squash(100 * votes)
    assert (long.norm(dim=-1) < 1).all() and (long.norm(dim=-1) > 0.9).all()
    close(torch.cosine_similarity(long, votes, dim=-1), torch.ones(3, 4, 5).double())
    assert torch.isfinite(torch.autograd.functional.jacobian(squash, torch.zeros(2, 3))).all()


@torch.no_grad()
def by_hand(layer, heads):
    """[B, T, H, d] -> [B, T, D]: every head's vote for every capsule, one product at a time."""
    joining, spec = layer.aggregation, layer.spec.aggregation
    inputs = heads
    if joining.inputs is not None:
        mixed = torch.relu(heads.flatten(2) @ joining.inputs.weight.T + joining.inputs.bias)
        inputs = mixed.unflatten(-1, (HEADS, -1))
    votes = torch.stack([inputs[:, :, h] @ joining.votes[h] for h in range(HEADS)], 2)
    votes = votes.unflatten(-1, (joining.capsules, -1))
    rows = []
    for token in votes.flatten(0, 1).tolist():
        if spec.routing == "em":
            betas = joining.beta_u.tolist(), joining.beta_a.tolist()
            rows.append(em_by_loops(token, spec.iterations, *betas, spec.em_lambda))
        else:
            rows.append(agreement_by_loops(token, spec.iterations, spec.routing == "dynamic"))
    joined = torch.tensor(rows, dtype=torch.float64).flatten(1).unflatten(0, heads.shape[:2])
    return joined if layer.o_proj is None else layer.o_proj(joined)


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("few_at_once", [False, True])
def test_a_layer(name, few_at_once, monkeypatch):
    if few_at_once:
        monkeypatch.setattr(routed_heads, "VOTES_AT_ONCE", 5 * HEADS * WIDTH)
    (layer,) = build_layers({"type": "dense", "aggregation": AGGREGATIONS[name]})
    (usual,) = build_layers("dense")
    usual.load_state_dict(
        {**usual.state_dict(), **{k: v for k, v in layer.state_dict().items() if k[:2] in ("q_", "k_", "v_")}}
    )
    states, heads = vectors(2, 6), []
    usual.o_proj.register_forward_hook(lambda _, given, __: heads.append(given[0].unflatten(-1, (HEADS, -1))))
    run_layers([usual], states, make_context(6))
    (result,) = run_layers([layer], states, make_context(6))
    close(result.output.detach(), by_hand(layer, heads[0].detach()), 1e-8)
    if few_at_once:  # the gradient is that of all tokens at once
        weights = torch.randn(result.output.shape, dtype=torch.float64)
        gradients = []
        for at_once in (5 * HEADS * WIDTH, 1 << 22):
            monkeypatch.setattr(routed_heads, "VOTES_AT_ONCE", at_once)
            output = run_layers([layer], states, make_context(6))[0].output
            gradients.append(torch.autograd.grad((output * weights).sum(), layer.parameters(), allow_unused=True))
        for one, other in zip(*gradients, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other)


def test_which_layers():
    config = XFormerConfig(**{**GEOMETRY, "attention": {"type": "dense", "aggregation": "routing_aggregation"}})
    made = [config.attention.build(config, layer_idx=index).aggregation is not None for index in range(3)]
    assert made == [True, True, False]
    config = XFormerConfig(
        **{**GEOMETRY, "attention": {"type": "dense", "aggregation": {"type": "capsule_heads", "layers": (2,)}}}
    )
    made = [config.attention.build(config, layer_idx=index).aggregation is not None for index in range(3)]
    assert made == [False, False, True]


@pytest.mark.parametrize("name", ["simple", "em", "dynamic", "capsule_em"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Finite, and near what the same numbers give in float64, also for large vectors."""
    (layer,) = build_layers({"type": "dense", "aggregation": AGGREGATIONS[name]})
    joining = layer.aggregation.to(dtype)
    for size in (1.0, 100.0):
        given = (size * vectors(2, 5)).to(dtype).requires_grad_()
        found = joining(given)
        found.float().sum().backward()
        exact = joining.double()(given.detach().double())
        joining.to(dtype)
        assert torch.isfinite(found).all() and torch.isfinite(given.grad).all()
        if size == 1.0:
            assert (found.double() - exact).abs().mean() < 0.05 * exact.abs().mean()
