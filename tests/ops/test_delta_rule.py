"""The delta rule in chunks against its recurrence, token by token, and against transformers' gated delta rule."""

import pytest
import torch
from torch.nn.functional import normalize

from hf_xformers.ops.linear.attention import delta_rule, delta_rule_reference
from hf_xformers.ops.linear.feature_maps import elu_plus_one, positive_features, sum_normalize
from tests.ops.linear_forms import assert_same, draw

B, H, T, F, DV = 2, 3, 37, 5, 4


def case(length=T):
    """Unit keys and queries, values, strengths in (0, 1)."""
    q, k = (normalize(torch.randn(B, H, length, F, dtype=torch.float64), dim=-1).requires_grad_() for _ in range(2))
    return q, k, draw(B, H, length, DV), torch.rand(B, H, length, dtype=torch.float64).requires_grad_()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_reference_is_the_recurrence_with_explicit_matrices():
    q, k, v, beta = (x[0, 0].detach() for x in case(9))
    state = torch.zeros(F, DV, dtype=torch.float64)
    rows = []
    for i in range(9):
        forget = torch.eye(F, dtype=torch.float64) - beta[i] * torch.outer(k[i], k[i])
        state = forget @ state + beta[i] * torch.outer(k[i], v[i])
        rows.append(q[i] @ state)
    out, end = delta_rule_reference(*(x[None, None] for x in (q, k, v)), beta[None, None])
    assert_same(out[0, 0], torch.stack(rows))
    assert_same(end[0, 0], state)


@pytest.mark.parametrize("length", [1, 2, T, 300])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64, 500])
def test_chunks_and_gradients_equal_the_recurrence(length, chunk_size):
    """Every length and every chunk with padding and without."""
    q, k, v, beta = case(length)
    state = draw(B, H, F, DV)
    mask = torch.rand(B, length) < 0.7 if (length + chunk_size) % 2 else None
    out, end = delta_rule(q, k, v, beta, state=state, key_padding_mask=mask, return_state=True, chunk_size=chunk_size)
    expected, expected_end = delta_rule_reference(q, k, v, beta, state=state, key_padding_mask=mask)
    assert_same(out, expected)
    assert_same(end, expected_end)
    grads, inputs = (torch.randn_like(out), torch.randn_like(end)), (q, k, v, beta, state)
    for ours, theirs in zip(
        torch.autograd.grad((out, end), inputs, grads), torch.autograd.grad((expected, expected_end), inputs, grads)
    ):
        assert_same(ours, theirs, 1e-11)


@pytest.mark.parametrize("length", [1, 50, 200])
@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
def test_parity_with_transformers(kind, length):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = getattr(module, f"torch_{kind}_gated_delta_rule")
    q, k, v, beta = (x.detach().float() for x in case(length))
    state = torch.randn(B, H, F, DV)
    given = [x.transpose(1, 2) for x in (q, k, v)]
    expected, end = theirs(
        *given, g=torch.zeros(B, length, H), beta=beta.transpose(1, 2), initial_state=state, output_final_state=True
    )
    out, ours = delta_rule(q * F**-0.5, k, v, beta, state=state, return_state=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours, end, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("length", [1, 40, 200])
def test_feature_map_inside_equals_features_outside(length):
    q, k, v, scale = draw(B, H, length, F), draw(B, H, length, F), draw(B, H, length, DV), draw(F)
    beta = torch.rand(B, H, length, dtype=torch.float64).requires_grad_()
    mask = torch.rand(B, length) < 0.8

    def features(x, s):
        return sum_normalize(elu_plus_one(x * s))

    inside = delta_rule(q, k, v, beta, scale, feature_map=features, key_padding_mask=mask)
    outside, _ = delta_rule_reference(features(q, scale), features(k, scale), v, beta, key_padding_mask=mask)
    assert_same(inside, outside)
    grad, inputs = torch.randn_like(outside), (q, k, v, beta, scale)
    for ours, theirs in zip(torch.autograd.grad(inside, inputs, grad), torch.autograd.grad(outside, inputs, grad)):
        assert_same(ours, theirs, 1e-11)


def test_gradients_of_a_long_text_in_float32():
    """States are taken back from the last one: rounding does not add up, also after values of very different size."""
    q, k = (normalize(torch.randn(1, 1, 2500, 8), dim=-1) for _ in range(2))
    v, beta, grad = torch.randn(1, 1, 2500, 8), torch.rand(1, 1, 2500), torch.randn(1, 1, 2500, 8)
    v[:, :, 1400:1450] *= 100.0
    single = [x.requires_grad_() for x in (q, k, v, beta)]
    double = [x.detach().double().requires_grad_() for x in single]
    found = torch.autograd.grad(delta_rule(*single, chunk_size=16), single, grad)
    expected = torch.autograd.grad(delta_rule_reference(*double)[0], double, grad.double())
    for ours, theirs in zip(found, expected):
        early = (ours - theirs)[:, :, :1200].norm() / theirs[:, :, :1200].norm()
        assert early < 1e-6
        assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_bfloat16_accumulates_in_float32():
    q, k, v, beta = (x.detach().bfloat16().requires_grad_() for x in case(200))
    out, state = delta_rule(q, k, v, beta, return_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact, _ = delta_rule_reference(q.double(), k.double(), v.double(), beta.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v, beta)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = delta_rule(q.float(), k.float(), v.float(), beta.float())
    torch.testing.assert_close(under, delta_rule(q.float(), k.float(), v.float(), beta.float()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(beta=torch.ones(B, H)), "beta"),
        (dict(query=torch.ones(B, H, 1, F)), "must be"),
        (dict(key_padding_mask=torch.ones(B, T)), "boolean"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(state=torch.ones(B, H, F, F)), "state has shape"),
        (dict(feature_map=lambda x: positive_features(x, torch.ones(4, F))), "pair"),
    ],
)
def test_refuses_what_cannot_work(change, message):
    given = dict(
        query=torch.ones(B, H, T, F),
        key=torch.ones(B, H, T, F),
        value=torch.ones(B, H, T, DV),
        beta=torch.ones(B, H, T),
    )
    with pytest.raises(ValueError, match=message):
        delta_rule(**{**given, **change})
