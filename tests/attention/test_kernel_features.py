"""Random features against the kernels that they estimate; long gates, draws, and vectors of zeros."""

import itertools
import math

import pytest
import torch

from hf_xformers.core.parallel_plans import tensor_parallel_plan
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close

D = WIDTH // HEADS
SMALL = {"num_features": 10, "chunk_size": 4}
SPECS = {
    "trigonometric": {"type": "performer", "feature_kind": "trigonometric", **SMALL},
    "guarded": {"type": "performer", "feature_kind": "trigonometric", "min_denominator": 0.6, **SMALL},
    "performer_relu": {"type": "performer", "feature_kind": "relu", **SMALL},
    "arccos": {"type": "arccos_attention", **SMALL},
    "arccos_plain": {"type": "arccos_attention", "num_features": None, "chunk_size": 4},
    "arccos_unit": {"type": "arccos_attention", "normalize_qk": True, **SMALL},
    "rfa": {"type": "rfa", "tau": 0.8, **SMALL},
    "rfa_guarded": {"type": "rfa", "min_denominator": 2.0, **SMALL},
    "rfa_arccos": {"type": "rfa", "feature_map": "arccos", "learn_sigma": False, **SMALL},
    "rfa_gate": {"type": "rfa", "gate": True, **SMALL},
    "dpfp": {"type": "dpfp", "nu": 2, "chunk_size": 4},
    "dpfp_sums": {"type": "dpfp", "attention_normalize": False, "chunk_size": 4},
    "dpfp_raw": {"type": "dpfp", "nu": 1, "sum_normalize": False, "eps": 0.5, "chunk_size": 4},
    "dpfp_raw_sums": {"type": "dpfp", "sum_normalize": False, "attention_normalize": False, "scale": 0.3},
}


def build(name, **fields):
    (layer,) = build_layers(SPECS[name], **fields)
    if getattr(layer, "num_rows", None):
        layer.directions.copy_(layer.draw(0))
    if getattr(layer, "sigma", None) is not None:
        layer.sigma.data.add_(1.0)
    return layer


# ------------------------------------------------------------------------------------------- kernels


def mean_output(layer, states, draws=4):
    found = []
    with torch.no_grad():
        for _ in range(draws):
            layer.redraw()
            found.append(run_layers([layer], states, make_context(states.shape[1]))[0].output)
    return torch.stack(found).mean(0)


def kernel_attention(layer, states, kernel):
    """All pairs with a kernel of vectors q, k [B, H, T, d]."""
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = kernel(q, k)
        return layer.o_proj((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


def arc_cosine(q, k):
    lengths = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
    angle = torch.acos(((q @ k.mT) / lengths).clamp(-1, 1))
    return lengths * (angle.sin() + (math.pi - angle) * angle.cos())


def of_unit_vectors(q, k, tau=0.8):
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return torch.exp(q @ k.mT / tau**2)


KERNELS = {
    "trigonometric": lambda q, k: torch.exp(q @ k.mT / D**0.5),
    "arccos": arc_cosine,
    "performer_relu": arc_cosine,
    "rfa": of_unit_vectors,
}


@pytest.mark.parametrize("name", KERNELS)
def test_many_features_give_the_kernel(name):
    """With many features the outputs are those of the kernel in closed form; with fewer they are further off."""
    errors = []
    for count in (64, 4096):
        more = {"kernel_eps": 1e-9} if name in ("arccos", "performer_relu") else {}
        (layer,) = build_layers({**SPECS[name], "num_features": count, **more})
        if name == "rfa":
            layer.sigma.data.fill_(1.0)
        states = vectors(1, 12) * (0.3 if name == "trigonometric" else 1.0)
        mean = mean_output(layer, states)
        exact = kernel_attention(layer, states, KERNELS[name])
        errors.append(float((mean - exact).norm() / exact.norm()))
    assert errors[1] < 0.03 and errors[0] > 3 * errors[1], errors


# ------------------------------------------------------------------------------------------- gates


def test_long_gated_texts_in_single_precision():
    """The sum of logarithms over a text is far larger than what single precision tells apart."""
    layer, states = build("rfa_gate", causal=True), vectors(1, 1500)
    with torch.no_grad():
        layer.decay_proj.bias.fill_(-12.0)
        layer.decay_proj.weight.mul_(20.0)
        expected = run_layers([layer], states, make_context(1500, True))[0].output
        found = run_layers([layer.float()], states.float(), make_context(1500, True))[0].output
    assert found.dtype == torch.float32
    assert (found.double() - expected).norm() / expected.norm() < 1e-4


# ------------------------------------------------------------------------------------------- draws, DPFP, refusals


def test_draws_of_heads():
    """Each head has rows of its own, orthogonal in blocks; training passes draw anew, evaluation does not."""
    layer, states = build("rfa"), vectors(1, 5)
    rows = layer.draw(0).double()
    assert rows.shape == (HEADS, 10, D) and (rows[0] - rows[1]).abs().max() > 0.1
    gram = rows[2, :D] @ rows[2, :D].T
    close(gram, gram.diagonal().diag(), 1e-5)
    seen = []
    for training in (True, True, False, False, True):
        run_layers([layer.train(training)], states, make_context(5))
        seen.append(layer.directions.clone())
    assert [torch.equal(one, other) for one, other in itertools.pairwise(seen)] == [False, True, True, False]
    close(seen[1], layer.draw(1).double())
    assert build("arccos_plain").num_rows is None and not list(build("arccos_plain").buffers())


def test_dpfp_with_the_delta_rule():
    """It is delta_net with the same features, whose strengths of writing tensor parallelism does not divide."""
    states = vectors(2, 9)
    outputs = []
    for spec in ({"type": "dpfp", "nu": 2, "update_rule": "delta"}, {"type": "delta_net", "nu": 2}):
        (layer,) = build_layers(spec, causal=True)
        outputs.append(run_layers([layer], states, make_context(9, True))[0].output.detach())
        assert not any("attention" in name for name in tensor_parallel_plan(layer.config))
    assert torch.equal(*outputs)


def test_a_vector_of_zeros():
    """It has no direction and, to DPFP, no features: finite outputs and slopes."""
    for name in SPECS:
        layer = build(name, causal=True)
        with torch.no_grad():
            layer.q_proj.bias.zero_()
            layer.k_proj.bias.zero_()
        states = vectors(1, 5)
        states[0, 1:3] = 0.0
        states.requires_grad_()
        output = run_layers([layer], states, make_context(5, True), residual=False)[0].output
        output.sum().backward()
        assert output.isfinite().all() and states.grad.isfinite().all(), name
