"""Linear attention and the delta rule where all chunks are taken at once, as on a GPU: the literal equations, few
launches, and bfloat16 operands whose products are summed in float32."""

import importlib
import itertools

import pytest
import torch
from torch.nn.functional import normalize

from hf_xformers.ops.common import segments
from hf_xformers.ops.linear import attention as linear
from hf_xformers.ops.linear.attention import (
    LinearState,
    delta_rule,
    delta_rule_reference,
    linear_attention,
    linear_attention_reference,
)
from tests.ops.linear_forms import draw
from tests.pretend_cuda import OnGPU, pretend_cuda

delta = importlib.import_module("hf_xformers.ops.linear.delta_rule")
B, H, F, DV = 2, 2, 5, 4


@pytest.fixture(params=[None, 1], ids=["one batch", "several"])
def at_once(request, monkeypatch):
    """The engines of a GPU, on the processor; with memory for one segment, or for so little that there are several."""
    for module in (linear, delta, segments):
        monkeypatch.setattr(module, "in_one_batch", lambda x: True)
    if request.param:
        monkeypatch.setattr(segments, "_BATCH_NUMBERS", 1)
        monkeypatch.setattr(segments, "_MIN_SEGMENT_TOKENS", 16)
    torch.manual_seed(0)


def some_mask(length):
    mask = torch.rand(B, length) < 0.7
    mask[0, :3] = False
    return mask


def assert_same(ours, theirs, inputs):
    """Outputs (tuples) and their gradients."""
    grads = tuple(torch.randn_like(x) for x in ours)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(ours, inputs, grads)
    for x, y in zip(found, torch.autograd.grad(theirs, inputs, grads, retain_graph=True), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [2, 16, 37])
@pytest.mark.parametrize(
    "weighted, rotated, normalized",
    [(False, False, True), (True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_linear_attention_is_the_equation(length, weighted, rotated, normalized, at_once):
    """Each length and each form with padding and without."""
    q, k = draw(B, H, length, F, positive=True), draw(B, H, length, F, positive=True)
    v, mask = draw(B, H, length, DV), some_mask(length) if (length + weighted + normalized) % 2 else None
    options = {"rotated_query": draw(*q.shape), "rotated_key": draw(*k.shape)} if rotated else {}
    if weighted:
        options["log_weight"] = draw(B, H, length)
    given = dict(options, causal=True, key_padding_mask=mask, normalize=normalized)
    ours = linear_attention(q, k, v, chunk_size=8, **given)
    assert_same((ours,), (linear_attention_reference(q, k, v, **given),), (q, k, v, *options.values()))


@pytest.mark.parametrize("weighted, rotated", list(itertools.product([False, True], repeat=2)))
def test_a_text_in_two_calls_is_the_text_in_one(weighted, rotated, at_once):
    q, k, v = draw(B, H, 50, F, positive=True), draw(B, H, 50, F, positive=True), draw(B, H, 50, DV)
    tensors = [q, k, v]
    names = ["query", "key", "value"]
    if rotated:
        tensors += [draw(*q.shape), draw(*q.shape)]
        names += ["rotated_query", "rotated_key"]
    if weighted:
        tensors, names = [*tensors, draw(B, H, 50)], [*names, "log_weight"]

    def call(start, stop, **more):
        pieces = {name: x[:, :, start:stop] for name, x in zip(names, tensors)}
        return linear_attention(**pieces, causal=True, chunk_size=8, return_state=True, **more)

    first, state = call(0, 21)
    second, end = call(21, 50, state=state)
    whole, last = call(0, 50)
    assert isinstance(end, LinearState) and (end.log_scale is not None) == weighted
    scale = [None if x.log_scale is None else x.log_scale.exp()[..., None] for x in (end, last)]
    sums = [x.z if s is None else x.z * s for x, s in zip((end, last), scale)]
    assert_same((torch.cat([first, second], dim=2), sums[0]), (whole, sums[1]), tensors)


def test_denominators_are_guarded_as_chunk_by_chunk(at_once, monkeypatch):
    q, k, v = draw(B, H, 37, F), draw(B, H, 37, F), draw(B, H, 37, DV)
    options = {"causal": True, "min_denominator": 0.5, "eps": 0.1, "chunk_size": 8}
    ours = linear_attention(q, k, v, **options)
    monkeypatch.setattr(linear, "in_one_batch", lambda x: False)
    assert_same((ours,), (linear_attention(q, k, v, **options),), (q, k, v))


@pytest.mark.parametrize("length", [2, 64, 70, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_the_delta_rule_is_its_recurrence(length, masked, at_once):
    with_state = masked == (length in (2, 70))
    q, k = (normalize(draw(B, H, length, F), dim=-1).detach().requires_grad_() for _ in range(2))
    v, beta = draw(B, H, length, DV), torch.rand(B, H, length, dtype=torch.float64).requires_grad_()
    options = {"key_padding_mask": some_mask(length) if masked else None}
    state = draw(B, H, F, DV) if with_state else None
    inputs = (q, k, v, beta, *([state] if with_state else []))
    theirs = delta_rule_reference(q, k, v, beta, state=state, **options)
    assert_same(delta_rule(q, k, v, beta, state=state, return_state=True, **options), theirs, inputs)
    assert_same((delta_rule(q, k, v, beta, state=state, **options),), theirs[:1], inputs)


@pytest.mark.parametrize("rule", [True, False], ids=["delta rule", "sums"])
def test_engines_are_one_graph(rule, at_once):
    q, k = (normalize(draw(B, H, 300, F), dim=-1).detach().requires_grad_() for _ in range(2))
    v, beta = draw(B, H, 300, DV), torch.rand(B, H, 300, dtype=torch.float64).requires_grad_()

    def call(q, k, v, beta):
        if rule:
            return delta_rule(q, k, v, beta)
        return linear_attention(q.abs(), k.abs(), v * beta[..., None], causal=True)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert_same((compiled(q, k, v, beta),), (call(q, k, v, beta),), (q, k, v, beta))


# ------------------------------------------------------------------------------------------------ on a GPU, pretended


def engine(name, length, dtype):
    """A call, and its inputs: features, values and what else there is."""
    q, k = (torch.rand(2, 12, length, 64, dtype=dtype) for _ in range(2))
    v, beta = torch.randn(2, 12, length, 64, dtype=dtype), torch.rand(2, 12, length)
    calls = {
        "sums": lambda q, k, v: linear_attention(q, k, v, causal=True),
        "weighted sums": lambda q, k, v, x: linear_attention(q, k, v, causal=True, log_weight=x.log()),
        "all keys": lambda q, k, v: linear_attention(q, k, v, causal=False),
        "delta rule": delta_rule,
    }
    if name == "delta rule":
        q, k = (normalize(torch.randn_like(x), dim=-1) for x in (q, k))
    return calls[name], (q, k, v, *([beta] if name in ("weighted sums", "delta rule") else []))


@pytest.mark.parametrize("name, most", [("sums", 60), ("weighted sums", 120), ("all keys", 60), ("delta rule", 120)])
def test_launches_for_4096_tokens(name, most, monkeypatch):
    call, inputs = engine(name, 4096, torch.bfloat16)
    with pretend_cuda(monkeypatch) as log:
        moved = [OnGPU(x).requires_grad_() for x in inputs]
        out = call(*moved)
        out.backward(OnGPU(torch.randn(out.shape, dtype=out.dtype)))
        assert log.launches.total() < most, log.launches
        assert not log.waits and not log.copies and not log.mixed


@pytest.mark.parametrize("name", ["sums", "weighted sums", "all keys", "delta rule"])
def test_bfloat16_operands_are_summed_in_float32(name, monkeypatch):
    """As near to float64 as a few roundings to 8 bits leave them; sums of 600 such numbers would be far off."""
    torch.manual_seed(0)
    call, inputs = engine(name, 600, torch.bfloat16)
    wide = [x.double().requires_grad_() for x in inputs]
    grad = torch.randn(2, 12, 600, 64, dtype=torch.bfloat16)
    expected = call(*wide)
    wanted = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    with pretend_cuda(monkeypatch):
        moved = [OnGPU(x).requires_grad_() for x in inputs]
        out = call(*moved)
        assert out.dtype == torch.bfloat16
        found = [x.inner for x in (out, *torch.autograd.grad(out, moved, OnGPU(grad)))]
    for x, y in zip(found, wanted, strict=True):
        assert ((x.double() - y).norm() / y.norm()).item() < 1.5e-2


class _NoGradient(torch.autograd.Function):
    """Its input has no gradient, which torch tells as None."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_result_that_needs_no_gradient(at_once):
    """What reads it says so with None: the inputs have none, or zeros, from there."""
    inputs = [draw(B, H, 40, F), draw(B, H, 40, F), draw(B, H, 40, DV)]
    out = delta_rule(*inputs, torch.rand(B, H, 40, dtype=torch.float64))
    (_NoGradient.apply(out).sum() + sum(x.sum() for x in inputs)).backward()
    assert all((x.grad == 1.0).all() for x in inputs)
