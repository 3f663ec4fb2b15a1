"""FLOATER: the solver against closed forms, the biases against attention with biased projections."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.position import floater
from hf_xformers.position.floater import trajectory
from tests.attention.score_helpers import vectors
from tests.helpers import close, make_strong, tokens
from tests.position.term_helpers import build, projected, run

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_solver_converges(solver, order):
    """p' = p A has the solution p(0) exp(A t); halving the step divides the error by 2^order."""
    torch.manual_seed(0)
    matrix = torch.randn(3, 3, dtype=torch.float64)
    start = torch.randn(2, 3, dtype=torch.float64)
    times = torch.arange(5).double() * 0.2
    exact = torch.stack([start @ torch.matrix_exp(matrix * t) for t in times])
    errors = []
    for substeps in (4, 8):
        found = trajectory(lambda t, p: p @ matrix, start, 5, 0.2, substeps, solver)
        errors.append((found - exact).abs().max())
    assert abs(torch.log2(errors[0] / errors[1]) - order) < 0.25


def test_sinusoid_as_a_path():
    """With the slope of a sinusoid, the path is the sinusoid: time reaches the dynamics, segments join."""
    frequency = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = trajectory(
        lambda t, p: frequency * torch.cos(frequency * t).expand_as(p), torch.zeros(2).double(), 9, 0.3, 20, "rk4"
    )
    close(found, torch.sin(frequency * 0.3 * torch.arange(9)[:, None]), 1e-7)
    rest = trajectory(lambda t, p: frequency * torch.cos(frequency * t), found[4], 5, 0.3, 20, "rk4", first=4)
    close(rest, found[4:])


def test_biases_by_hand(monkeypatch):
    """The released dynamics and the midpoint rule in a loop; then attention with biased projections."""
    layer, module, _ = build({"type": "floater", "delta": 0.1, "substeps": 2}, strong=0.3, num_hidden_layers=2)
    first, second, step = module.dynamics.first, module.dynamics.second, 0.05

    def slope(t, p):
        time = torch.full((*p.shape[:-1], 1), t, dtype=p.dtype)
        return second(torch.cat([torch.relu(first(torch.cat([p, time], -1))), time], -1))

    state, states = module.start, [module.start]
    for number in range(16):
        t = number * step
        state = state + step * slope(t + step / 2, state + step / 2 * slope(t, state))
        if number % 2:
            states.append(state)
    path = torch.stack(states)  # [9, 3, layers, D]
    for segment in (32, 4, 3):
        monkeypatch.setattr(floater, "SEGMENT", segment)
        close(module.biases(9), path)
        close(module.biases(5), path[:5])
        with torch.no_grad():
            close(module.biases(9), path)
    vectors_in = vectors(2, 9)
    query, key, value = projected(layer, vectors_in)
    added = path[:, :, 0].view(9, 3, 4, 4).permute(1, 2, 0, 3)
    query, key, value = query + added[0], key + added[1], value + added[2]
    weights = torch.softmax(query @ key.transpose(-1, -2) * 0.5, dim=-1)
    expected = layer.o_proj((weights @ value).transpose(1, 2).flatten(2))
    for literal in (False, True):
        close(run(layer, module, vectors_in, literal=literal)[0], expected)


def test_translation_invariant_path():
    """Without time: what starts at a later state goes on as the path does; with time it does not. By hand, the
    midpoint rule on f(p); gradients reach all of it."""
    spec = {"type": "floater", "delta": 0.5, "substeps": 1, "translation_invariant": True}
    _, module, _ = build(spec, strong=0.3, num_hidden_layers=2)
    _, timed, _ = build({**spec, "translation_invariant": False}, strong=0.3, num_hidden_layers=2)
    first, second = module.dynamics.first, module.dynamics.second
    assert first.weight.shape == (16, 16) and timed.dynamics.first.weight.shape == (16, 17)
    state, states = module.start, [module.start]
    for _ in range(8):
        middle = state + 0.25 * second(torch.relu(first(state)))
        state = state + 0.5 * second(torch.relu(first(middle)))
        states.append(state)
    path = module.biases(9)
    close(path, torch.stack(states))
    grown = torch.autograd.grad(path[-1].sum(), list(module.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in grown)
    for part, invariant in ((module, True), (timed, False)):
        with torch.no_grad():
            later = part.biases(9)[3:].clone()
            part.start.copy_(later[0])
            assert torch.allclose(part.biases(6), later) == invariant


def test_solution_is_kept_only_while_it_is_true():
    torch.manual_seed(0)
    model = make_strong(XFormerModel(XFormerConfig(**SIZES, position="floater")).double().eval(), amount=0.3)
    ids = tokens(1, 6, high=50)
    with torch.no_grad():
        before = model(ids).last_hidden_state
        close(model(ids).last_hidden_state, before)
        model.trunk.position.start.add_(1.0)
        assert (model(ids).last_hidden_state - before).abs().max() > 1e-3
    assert not any("kept" in name for name in model.state_dict())
