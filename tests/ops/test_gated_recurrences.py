"""Decayed scans and the gated delta rule in chunks against their recurrences, token by token."""

import functools

import pytest
import torch
from torch.nn.functional import normalize

from hf_xformers.ops.common import segments
from hf_xformers.ops.linear import gated_chunks
from hf_xformers.ops.linear.decayed_scan import decayed_scan
from hf_xformers.ops.linear.delta_rule import delta_rule
from hf_xformers.ops.linear.gated_delta import gated_delta_rule
from hf_xformers.ops.linear.reference import gated_recurrence_reference
from tests.pretend_cuda import OnGPU, pretend_cuda

B, G, H, K, V = 2, 2, 4, 5, 3
ENGINES = {"scan": False, "delta": True}
each_engine = pytest.mark.parametrize("corrects", ENGINES.values(), ids=ENGINES)
each_decay = pytest.mark.parametrize("channels", [False, True], ids=["token", "channel"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def case(length, corrects, channels, strength=5.0, dtype=torch.float64):
    """Queries, unit keys, values, (strengths up to 2,) log decays with zeros among them, and a state."""
    key = normalize(torch.randn(B, G, length, K, dtype=torch.float64), dim=-1)
    beta = (2 * torch.rand(B, H, length, dtype=torch.float64),) if corrects else ()
    decay = -strength * torch.rand(B, H, length, *([K] if channels else []), dtype=torch.float64)
    decay[:, :, ::5] = 0.0
    state = torch.randn(B, H, K, V, dtype=torch.float64)
    query, value = torch.randn_like(key), torch.randn(B, H, length, V, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, *beta, decay, state)]


def engine(inputs, **options):
    *inputs, state = inputs
    run = gated_delta_rule if len(inputs) == 5 else decayed_scan
    return run(*inputs, state=state, return_state=True, **options)


def literal(inputs, **options):
    query, key, value, *beta, decay, state = inputs
    options["beta"] = beta[0] if beta else None
    return gated_recurrence_reference(query, key, value, decay, state=state, **options)


def assert_same(actual, expected, tolerance=1e-12):
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.isfinite(ours).all()
        bound = tolerance * max(theirs.abs().max().item(), 1.0)
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0.0, atol=bound)


def assert_same_with_gradients(run, literal_run, inputs, tolerance=1e-12):
    found, inputs_wide = run(inputs), [x.detach().double().requires_grad_() for x in inputs]
    expected = literal_run(inputs_wide)
    grads = [torch.randn_like(x) for x in expected]
    assert_same(found, expected, tolerance)
    ours = torch.autograd.grad(found, inputs, [g.to(x) for g, x in zip(grads, found, strict=True)])
    assert_same(ours, torch.autograd.grad(expected, inputs_wide, grads), tolerance)


def test_reference_is_the_recurrence_with_explicit_matrices():
    query, key, value, beta, decay, _ = (x[0, 1].detach() for x in case(9, True, True))
    state, rows = torch.zeros(K, V, dtype=torch.float64), []
    for t in range(9):
        forget = torch.eye(K, dtype=torch.float64) - beta[t] * torch.outer(key[t], key[t])
        state = forget @ torch.diag(decay[t].exp()) @ state + beta[t] * torch.outer(key[t], value[t])
        rows.append(query[t] @ state)
    inputs = (x[None, None] for x in (query, key, value, decay))
    assert_same(
        gated_recurrence_reference(*inputs, beta=beta[None, None]), (torch.stack(rows)[None, None], state[None, None])
    )


@each_engine
@each_decay
@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_chunks_and_gradients_equal_the_recurrence(corrects, channels, length):
    """Each engine and each length with weak decays and with strong ones."""
    strength = 30.0 if (corrects + channels + length) % 2 else 0.1
    assert_same_with_gradients(engine, literal, case(length, corrects, channels, strength))


@each_engine
@each_decay
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 100])
def test_chunks_of_any_size(corrects, channels, chunk_size):
    run = functools.partial(engine, chunk_size=chunk_size)
    assert_same_with_gradients(run, literal, case(37, corrects, channels))


@each_engine
@each_decay
def test_many_segments_and_a_constant_decay(corrects, channels):
    assert_same_with_gradients(engine, literal, case(700, corrects, channels, 0.05))
    query, key, value, *beta, _, _ = case(40, corrects, False)
    constant = torch.linspace(-2.0, -0.01, H, dtype=torch.float64).requires_grad_()
    each = constant.detach()[None, :, None].repeat(B, 1, 40).requires_grad_()
    run = gated_delta_rule if corrects else decayed_scan
    outputs = [run(query, key, value, *beta, decay) for decay in (constant, each)]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(out.sum(), decay)[0] for out, decay in zip(outputs, (constant, each), strict=True)]
    assert_same(grads[:1], [grads[1].sum((0, 2))])


@each_engine
@each_decay
@pytest.mark.parametrize("at_once", [False, True], ids=["processor", "at once"])
def test_float32_with_strong_decays(corrects, channels, at_once, monkeypatch):
    """Neither overflow nor cancellation, after decays of -30 at every token and of -1e6 at some."""
    for module in (segments, gated_chunks):
        monkeypatch.setattr(module, "in_one_batch", lambda x: at_once)
    inputs = case(256, corrects, channels, 30.0, torch.float32)
    with torch.no_grad():
        inputs[-2][:, :, ::50] = -1e6
    assert_same_with_gradients(engine, literal, inputs, 1e-6)


@each_engine
@each_decay
def test_decays_of_minus_infinity(corrects, channels):
    inputs = case(70, corrects, channels)
    with torch.no_grad():
        inputs[-2][:, :, [0, 11, 64]] = -torch.inf
    assert_same(engine(inputs), literal(inputs))
    out, state = engine(inputs)
    for grad in torch.autograd.grad(out.sum() + state.sum(), inputs):
        assert torch.isfinite(grad).all()
    assert not torch.autograd.grad(engine(inputs)[0].sum(), inputs[-2])[0][:, :, [0, 11, 64]].any()


@each_engine
@each_decay
@pytest.mark.parametrize("length", [1, 70])
def test_padding_leaves_the_state(corrects, channels, length):
    """Before, behind and inside a text: as the literal loop, and as the real tokens alone."""
    inputs, mask = case(length, corrects, channels), torch.rand(B, length) < 0.6
    with torch.no_grad():
        for x in inputs[:-1]:
            x.mul_(torch.where(mask[:, None] if x.dim() == 3 else mask[:, None, :, None], 1.0, 3.0))
    options = {"key_padding_mask": mask}
    assert_same_with_gradients(functools.partial(engine, **options), functools.partial(literal, **options), inputs)
    out, state = engine(inputs, **options)
    for row in range(B):
        alone = [x[row : row + 1, :, mask[row]] for x in inputs[:-1]]
        if mask[row].any():
            assert_same(
                (out[row : row + 1, :, mask[row]], state[row : row + 1]), literal([*alone, inputs[-1][row : row + 1]])
            )
        else:
            assert_same((state[row],), (inputs[-1][row],))


@each_engine
@each_decay
def test_documents_are_kept_apart(corrects, channels):
    inputs = case(90, corrects, channels, 0.1)
    documents = torch.stack([torch.arange(90) // 40, (torch.arange(90) > 3).long()])
    options = {"segment_ids": documents}
    assert_same_with_gradients(functools.partial(engine, **options), functools.partial(literal, **options), inputs)


@each_engine
@each_decay
def test_pieces_of_any_size(corrects, channels):
    inputs = case(150, corrects, channels, 0.3)
    expected, end = engine(inputs)
    state, found, start = inputs[-1], [], 0
    for size in (1, 70, 1, 1, 13, 64):
        piece = [x[:, :, start : start + size] for x in inputs[:-1]]
        out, state = engine([*piece, state])
        found.append(out)
        start += size
    assert_same((torch.cat(found, dim=2), state), (expected, end))


def test_without_decay_it_is_the_delta_rule():
    query, key, value, beta, decay, _ = case(100, True, False)
    query, key = query.repeat_interleave(2, 1), key.repeat_interleave(2, 1)
    assert_same((gated_delta_rule(query, key, value, beta, 0 * decay),), (delta_rule(query, key, value, beta),))


@each_engine
@each_decay
def test_memory_kept_for_gradients_grows_with_tokens_alone(corrects, channels):
    """The inputs and a state for each segment; not a state for each token or chunk."""

    def kept(length):
        inputs, sizes = case(length, corrects, channels), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            engine(inputs)
        repeated = H // G if channels else 1  # queries and keys of every head
        return sum(sizes) - sum(x.numel() * (repeated if x.shape[1] == G else 1) for x in inputs[:-1])

    assert kept(64) == B * H * K * V
    assert kept(8192) <= 16 * B * H * K * V


@each_engine
@each_decay
def test_bfloat16_and_autocast_keep_sums_and_state_in_float32(corrects, channels):
    inputs = case(300, corrects, channels, 0.01, torch.float32)
    expected, end = engine(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(engine(inputs), (expected, end), 0.0)
    query, key, value, *others = inputs
    low = [x.to(torch.bfloat16) for x in (query, key, value)]
    out, state = engine([*low, *others])
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert_same((state,), engine([*(x.float() for x in low), *others])[1:], 0.0)


@each_engine
@each_decay
def test_a_device_that_takes_all_chunks_at_once(corrects, channels, monkeypatch):
    inputs = case(150, corrects, channels, 0.5, torch.float32)

    def on_gpu(given):
        return [x.inner for x in engine([OnGPU(x) for x in given])]

    with pretend_cuda(monkeypatch), torch.no_grad():
        found = on_gpu(inputs)
    assert_same(found, literal([x.double() for x in inputs]), 1e-5)


@each_engine
@each_decay
@pytest.mark.parametrize("length, shortest", [(2, 128), (37, 128), (37, 8)], ids=["short", "one batch", "several"])
def test_all_chunks_at_once_with_gradients(corrects, channels, length, shortest, monkeypatch):
    """Chunks of four tokens, whose states are joined in log2 steps, on the processor; and in several segments."""
    for module in (segments, gated_chunks):
        monkeypatch.setattr(module, "in_one_batch", lambda x: True)
    if shortest < length:
        monkeypatch.setattr(segments, "_BATCH_NUMBERS", 1)
        monkeypatch.setattr(segments, "_MIN_SEGMENT_TOKENS", shortest)
    inputs = case(length, corrects, channels)
    with torch.no_grad():
        inputs[-2][0, 1, length // 2] = -torch.inf
    run = functools.partial(engine, chunk_size=4)
    assert_same_with_gradients(run, literal, inputs)


@pytest.mark.parametrize(
    "corrects, channels, most, most_with_backward",
    [(False, 1, 45, 120), (True, 1, 70, 200), (False, 64, 80, 190), (True, 64, 100, 275)],
)
def test_launches_for_4096_tokens(corrects, channels, most, most_with_backward, monkeypatch):
    query, key = (torch.randn(1, 4, 4096, 64, dtype=torch.bfloat16) for _ in range(2))
    value, beta, decay = torch.randn_like(query), torch.rand(1, 4, 4096), -torch.rand(1, 4, 4096, channels)
    decay = decay[..., 0] if channels == 1 else decay
    given = query, normalize(key, dim=-1), value, *([beta] if corrects else []), decay
    with pretend_cuda(monkeypatch) as log:
        moved = [OnGPU(x).requires_grad_() for x in given]
        out = (gated_delta_rule if corrects else decayed_scan)(*moved)
        assert log.launches.total() < most, log.launches
        out.backward(OnGPU(torch.randn_like(value)))
        assert log.launches.total() < most_with_backward, log.launches
        assert not log.waits and not log.copies and not log.mixed


@each_engine
def test_halvings_at_once_keep_to_the_memory_of_a_batch(corrects, monkeypatch):
    monkeypatch.setattr(segments, "_BATCH_NUMBERS", 1 << 20)
    with pretend_cuda(monkeypatch) as log:
        given = [OnGPU(x.detach()).requires_grad_() for x in case(1000, corrects, True, dtype=torch.float32)]
        engine(given)[0].sum().backward()
        assert log.largest < 1.2 * (1 << 20)


@each_engine
def test_refusals(corrects):
    query, key, value, *beta, decay, state = (x.detach() for x in case(5, corrects, False))
    run = gated_delta_rule if corrects else decayed_scan
    with pytest.raises(ValueError, match="G divides H"):
        run(query, key, value[:, :3], *beta, decay)
    with pytest.raises(ValueError, match=r"log_decay must be \[H\]"):
        run(query, key, value, *beta, decay[:, :, :4])
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        run(query, key, value, *beta, decay, chunk_size=0)
    with pytest.raises(ValueError, match="state has shape"):
        run(query, key, value, *beta, decay, state=state.mT)
    with pytest.raises(ValueError, match="key_padding_mask must be a boolean tensor"):
        run(query, key, value, *beta, decay, key_padding_mask=torch.ones(B, 5))
    query.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(run(query, key, value, *beta, decay).sum(), query, create_graph=True)


def test_strengths_of_another_shape_are_refused():
    query, key, value, beta, decay, _ = (x.detach() for x in case(5, True, False))
    with pytest.raises(ValueError, match="beta must be"):
        gated_delta_rule(query, key, value, beta[:, :2], decay)
