"""Linear attention against the equation over all pairs, a token recurrence, and its invariants, in float64."""

import itertools
import math

import pytest
import torch

from hf_xformers.ops.linear.attention import (
    kernel_attention,
    linear_attention,
    linear_attention_reference,
)
from hf_xformers.ops.linear.feature_maps import (
    elu_plus_one,
    hyperbolic_features,
    positive_features,
    random_features_reference,
    random_matrix,
    trigonometric_features,
)
from tests.ops.linear_forms import FORMS, assert_same, assert_same_with_gradients, draw, inputs_of

B, H, T, F, DV = 2, 3, 37, 5, 4


def some_mask(length=T):
    """Left padding in row 0, a hole in row 1."""
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[0, :6] = False
    mask[1, length // 2 : length // 2 + 3] = False
    mask[1, -2:] = False
    return mask


def by_hand(phi_q, phi_k, v, visible, weight=None, normalize=True):
    """One query, one key at a time: shares no line with the reference of the product."""
    out = torch.zeros(*phi_q.shape[:3], v.shape[3], dtype=v.dtype)
    for b, h, i in itertools.product(range(v.shape[0]), range(v.shape[1]), range(phi_q.shape[2])):
        total, norm = torch.zeros(v.shape[3], dtype=v.dtype), 0.0
        for j in range(v.shape[2]):
            if visible(b, i, j):
                w = float(phi_q[b, h, i] @ phi_k[b, h, j]) * (1.0 if weight is None else math.exp(weight[b, h, j]))
                total, norm = total + w * v[b, h, j], norm + w
        out[b, h, i] = total / (norm if normalize and norm else 1.0)
    return out


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_and_fast_form_follow_the_definition(causal, weighted):
    q, k, v = draw(2, 2, 9, 3, positive=True), draw(2, 2, 9, 3, positive=True), draw(2, 2, 9, 2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :2], mask[1, 4] = False, False
    weight = torch.randn(2, 2, 9, dtype=torch.float64) if weighted else None
    expected = by_hand(
        q.detach(), k.detach(), v.detach(), lambda b, i, j: mask[b, j] and (j <= i or not causal), weight
    )
    options = dict(causal=causal, key_padding_mask=mask, log_weight=weight)
    assert_same(linear_attention_reference(q, k, v, **options), expected)
    assert_same(linear_attention(q, k, v, chunk_size=4, **options), expected)


@pytest.mark.parametrize("chunk_size", [1, 7, T, T + 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_causal_scan_and_its_gradients_equal_the_dense_form(form, masked, chunk_size):
    inputs, options = inputs_of(form, (B, H), T, T, F, DV)
    options["key_padding_mask"] = some_mask() if masked else None
    fast = linear_attention(*inputs[:3], causal=True, chunk_size=chunk_size, **options)
    assert_same_with_gradients(fast, linear_attention_reference(*inputs[:3], causal=True, **options), inputs)


@pytest.mark.parametrize("keys", [1, 11, 300])
@pytest.mark.parametrize("form", ["plain", "rotated weighted", "unnormalized", "eps"])
def test_bidirectional_form_and_its_gradients_equal_the_dense_form(form, keys):
    inputs, options = inputs_of(form, (B, H), 23, keys, F, DV, weight=1.0)
    options["key_padding_mask"] = torch.rand(B, keys) < 0.7
    fast = linear_attention(*inputs[:3], causal=False, **options)
    assert_same_with_gradients(fast, linear_attention_reference(*inputs[:3], causal=False, **options), inputs)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 400])
def test_any_length_over_several_segments(length):
    q, k, v = draw(1, 2, length, F, positive=True), draw(1, 2, length, F, positive=True), draw(1, 2, length, DV)
    weight = torch.randn(1, 2, length, dtype=torch.float64)
    for causal, log_weight in itertools.product((False, True), (None, weight)):
        fast = linear_attention(q, k, v, causal=causal, log_weight=log_weight)
        dense = linear_attention_reference(q, k, v, causal=causal, log_weight=log_weight)
        assert_same_with_gradients(fast, dense, (q, k, v))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_prefill_and_steps_equal_the_full_pass(weighted, rotated):
    q, k, v = draw(B, H, T, F, positive=True), draw(B, H, T, F, positive=True), draw(B, H, T, DV)
    full_options = {}
    if weighted:
        # The largest weight comes early, then late: the running maximum must hold and must rise.
        full_options["log_weight"] = 30 * torch.randn(B, H, T, dtype=torch.float64)
    if rotated:
        full_options.update(rotated_query=draw(B, H, T, F), rotated_key=draw(B, H, T, F))
    mask = some_mask()

    def piece(start, stop):
        options = {name: x[:, :, start:stop] for name, x in full_options.items()}
        return [x[:, :, start:stop] for x in (q, k, v)], dict(options, key_padding_mask=mask[:, start:stop])

    full, end = linear_attention(q, k, v, causal=True, key_padding_mask=mask, return_state=True, **full_options)
    state, outputs = None, []
    for start, stop in [(0, 9), (9, 20)] + [(t, t + 1) for t in range(20, T)]:
        tensors, options = piece(start, stop)
        out, state = linear_attention(*tensors, causal=True, state=state, return_state=True, chunk_size=4, **options)
        outputs.append(out)
    assert_same(torch.cat(outputs, dim=2), full)
    for ours, theirs in zip(state, end):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-11)
    assert end.kv.shape == (B, H, F, DV) and end.z.shape == (B, H, F)


def test_min_denominator_keeps_the_sign():
    q = torch.tensor([[[[1.0], [-1.0], [4.0]]]], dtype=torch.float64)
    k, v = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = linear_attention(q, k, v, causal=False, min_denominator=1.0)
    assert out.flatten().tolist() == [0.5, 0.5, 1.0]


def test_a_later_weight_cannot_underflow_an_earlier_row_in_float32():
    # Inside one chunk: a factor shared by the chunk would turn the first rows into 0 / 0.
    q, k, v = (torch.rand(1, 1, 8, F) for _ in range(3))
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 500.0, 1000.0, 5.0, -1e6]).view(1, 1, 8)
    out = linear_attention(q, k, v, causal=True, log_weight=weight)
    expected = linear_attention_reference(
        q[:, :, :4], k[:, :, :4], v[:, :, :4], causal=True, log_weight=weight[..., :4]
    )
    torch.testing.assert_close(out[:, :, :4], expected)
    torch.testing.assert_close(out[:, :, 4], v[:, :, 4])
    torch.testing.assert_close(out[:, :, 5:], v[:, :, 5:6].expand(-1, -1, 3, -1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_row_of_padding_only_gives_zeros_and_zero_gradients(causal, eps):
    q, k, v = draw(B, H, T, F), draw(B, H, T, F), draw(B, H, T, DV)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1] = False
    projection = random_matrix(8, F, dtype=torch.float64)
    for out in (
        linear_attention(elu_plus_one(q), elu_plus_one(k), v, causal=causal, key_padding_mask=mask, eps=eps),
        kernel_attention(q, k, v, positive_features, projection, causal=causal, key_padding_mask=mask, eps=eps),
    ):
        assert (out[1] == 0).all() and (out[0] != 0).all()
        for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
            assert torch.isfinite(gradient).all() and (gradient[1] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric"])
def test_kernel_attention_equals_attention_with_unscaled_random_features(name, causal):
    q, k, v = (draw(B, H, 150, F), draw(B, H, 150, F), draw(B, H, 150, DV))
    projection = random_matrix(32, F, dtype=torch.float64).requires_grad_()
    mask = some_mask(150)
    map_ = {"positive": positive_features, "hyperbolic": hyperbolic_features, "trigonometric": trigonometric_features}
    scale = 0.3  # keeps trigonometric denominators away from 0

    def scaled(x, w):
        return map_[name](scale * x, w)

    fast = kernel_attention(q, k, v, scaled, projection, causal=causal, key_padding_mask=mask)
    features = (random_features_reference(scale * x, projection, name) for x in (q, k))
    dense = linear_attention_reference(*features, v, causal=causal, key_padding_mask=mask)
    assert_same(fast, dense, 1e-10)
    grad, inputs = torch.randn_like(dense), (q, k, v, projection)
    for ours, theirs in zip(torch.autograd.grad(fast, inputs, grad), torch.autograd.grad(dense, inputs, grad)):
        assert_same(ours, theirs, 1e-9)


def test_kernel_attention_with_two_maps_and_a_learned_parameter():
    q, k, v, sigma = draw(B, H, 200, F), draw(B, H, 200, F), draw(B, H, 200, DV), draw(F)

    def key_map(x, s):
        return (x * s).exp()

    def query_map(x, s):
        return (x + s).softmax(-1)

    for causal in (False, True):
        fast = kernel_attention(q, k, v, query_map, sigma, key_map=key_map, causal=causal)
        dense = linear_attention_reference(query_map(q, sigma), key_map(k, sigma), v, causal=causal)
        assert_same(fast, dense, 1e-11)
        grad, inputs = torch.randn_like(dense), (q, k, v, sigma)
        for ours, theirs in zip(torch.autograd.grad(fast, inputs, grad), torch.autograd.grad(dense, inputs, grad)):
            assert_same(ours, theirs, 1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_accumulates_in_float32(causal):
    length = 600
    q, k = (elu_plus_one(torch.randn(1, 2, length, 16)).bfloat16().requires_grad_() for _ in range(2))
    v = torch.randn(1, 2, length, 16).bfloat16().requires_grad_()
    out, state = linear_attention(q, k, v, causal=causal, return_state=True)
    assert out.dtype == torch.bfloat16 and {x.dtype for x in state[:2]} == {torch.float32}
    exact = linear_attention_reference(q.double(), k.double(), v.double(), causal=causal)
    # One rounding to 8 bits of the result, nothing lost on the way.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    for x in torch.autograd.grad(out.sum(), (q, k, v)):
        assert x.dtype == torch.bfloat16 and torch.isfinite(x).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = linear_attention(q.float(), k.float(), v.float(), causal=causal)
    torch.testing.assert_close(under, linear_attention(q.float(), k.float(), v.float(), causal=causal))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key_padding_mask=torch.ones(B, 1, T, T, dtype=torch.bool)), "boolean tensor of shape"),
        (dict(key_padding_mask=torch.ones(B, T)), "torch.float32"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(log_weight=torch.ones(B, T)), "log_weight"),
        (dict(rotated_query=torch.ones(B, H, T, F)), "both or neither"),
        (dict(normalize=False, log_weight=torch.ones(B, H, T)), "normalize=False"),
        (dict(state=(torch.ones(B, H, 2, 2), torch.ones(B, H, 2))), "state holds"),
        (dict(value=torch.ones(B, H, T + 1, DV)), "must be"),
        (dict(query=torch.ones(B, H, 2, F)), "as many queries as keys"),
    ],
)
def test_refuses_what_cannot_work(change, message):
    given = dict(query=torch.ones(B, H, T, F), key=torch.ones(B, H, T, F), value=torch.ones(B, H, T, DV), causal=True)
    with pytest.raises(ValueError, match=message):
        linear_attention(**{**given, **change})


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_keys_beside_a_map(causal):
    """What weights and a map give together is what weights give to its features; gradients too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 13, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = 3 * torch.randn(2, 3, 13, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 13).bool()
    mask[1, :4] = False
    found = []
    for mapped in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, weight)]
        *given, logs = leaves
        options = {"causal": causal, "key_padding_mask": mask, "log_weight": logs, "return_state": True}
        if mapped:
            out, state = kernel_attention(*given, elu_plus_one, chunk_size=4, **options)
        else:
            features = (elu_plus_one(given[0]), elu_plus_one(given[1]))
            out, state = linear_attention(*features, given[2], chunk_size=4, **options)
        (out.square().sum() + state.kv.sum()).backward()
        found.append([out.detach(), *state, *(x.grad for x in leaves)])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)

    def scaled(x):
        return elu_plus_one(x), x.sum(-1)

    with pytest.raises(ValueError, match="takes no log_weight"):
        kernel_attention(q, k, v, scaled, causal=causal, log_weight=weight)


def test_gradients_by_the_scale_of_a_state():
    """A state and its scale are one number in two: what changes both in turn has no gradient."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(2, 3, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    options = {"causal": True, "return_state": True, "chunk_size": 4}
    _, state = linear_attention(q, k, v, log_weight=weight, **options)
    for length in (1, 9):
        shift = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        kv, z = state.kv / shift.exp()[..., None, None], state.z / shift.exp()[..., None]
        more, logs = (x[:, :, :length] for x in (q, k, v)), weight[:, :, :length]
        out, end = linear_attention(*more, log_weight=logs, state=(kv, z, state.log_scale + shift), **options)
        after = end.kv * end.log_scale.exp()[..., None, None]
        assert float(torch.autograd.grad((out.sin().sum() + after.sin().sum()), shift)[0].abs().max()) < 1e-12


def test_wide_weights_of_keys():
    """Logarithms far larger than float32 can tell apart, in float64 beside tensors of float32: as in float64 at all,
    in one piece and continued from a state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2, 40, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = 1e9 + torch.randn(1, 2, 40, generator=generator, dtype=torch.float64).cumsum(-1)
    expected = linear_attention_reference(q, k, v, causal=True, log_weight=weight)
    q, k, v = (x.float() for x in (q, k, v))
    found = linear_attention(q, k, v, causal=True, log_weight=weight, chunk_size=8)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    parts, state = [], None
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        piece = [x[:, :, start:stop] for x in (q, k, v)]
        out, state = linear_attention(
            *piece, causal=True, log_weight=weight[:, :, start:stop], state=state, return_state=True, chunk_size=8
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_state_keeps_no_more_than_it_shows(heads):
    """No view of what a long text needed: caches hold states for as long as a text is written."""
    query, key, value = (torch.rand(1, heads, 300, 4) for _ in range(3))
    weight = torch.randn(1, heads, 300)
    _, state = linear_attention(query, key, value, causal=True, log_weight=weight, return_state=True, chunk_size=16)
    for tensor in state:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
