"""Linear attention over all pairs of a short text: the same function as the sums over keys and as the equation."""

import pytest
import torch

from hf_xformers.ops.linear import attention
from hf_xformers.ops.linear.attention import kernel_attention, linear_attention, linear_attention_reference
from hf_xformers.ops.linear.feature_maps import random_matrix
from hf_xformers.ops.linear.feature_pullbacks import EluPlusOne, PositiveFeatures
from hf_xformers.ops.linear.pairs import Pairs, pairs_are_fewer
from tests.ops.linear_forms import FORMS, assert_same_with_gradients, inputs_of

B, H, F, DV = 2, 3, 24, 16  # all pairs are fewer below 19.2 tokens


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that came by all pairs."""
    found = []

    class Counted:
        @staticmethod
        def apply(*given):
            found.append(tuple(given[0].shape))
            return Pairs.apply(*given)

    monkeypatch.setattr(attention, "Pairs", Counted)
    return found


SIZES = [(1, 1), (1, 17), (17, 1), (13, 17)]
# Each form and each size with padding and without.
EACH = [(form, *sizes, bool((i + j) % 2)) for i, form in enumerate(FORMS) for j, sizes in enumerate(SIZES)]


@pytest.mark.parametrize("form, queries, keys, masked", EACH)
def test_values_and_gradients_are_those_of_the_equation(form, queries, keys, masked, calls):
    inputs, options = inputs_of(form, (B, H), queries, keys, F, DV, weight=30.0)
    if masked:
        options["key_padding_mask"] = torch.rand(B, keys) < 0.6
        options["key_padding_mask"][0, 0] = True
        options["key_padding_mask"][1] = False  # nothing but padding
    pairs = linear_attention(*inputs[:3], causal=False, **options)
    assert calls == [(B, H, queries, F)]
    sums, _ = linear_attention(*inputs[:3], causal=False, return_state=True, **options)
    assert len(calls) == 1  # which need the sums
    assert_same_with_gradients(pairs, sums, inputs)
    pairs = linear_attention(*inputs[:3], causal=False, **options)
    assert_same_with_gradients(pairs, linear_attention_reference(*inputs[:3], causal=False, **options), inputs)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_and_close_at_any_scale(dtype, scale, calls):
    rows = random_matrix(64, 8)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 2, 12, 8), dim=-1) * scale for _ in range(2))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, torch.randn(1, 2, 12, 16)))
    found = kernel_attention(q, k, v, PositiveFeatures(0.6), rows, causal=False)
    assert len(calls) == 1 and found.dtype == dtype
    sums, _ = kernel_attention(q, k, v, PositiveFeatures(0.6), rows, causal=False, return_state=True)
    torch.testing.assert_close(found, sums, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-5)
    for gradient in torch.autograd.grad(found.sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


def test_long_texts_graphs_and_states_take_sums(calls):
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    kernel_attention(q, k, v, EluPlusOne(), causal=False)
    short = [x[:, :, :5] for x in (q, k, v)]
    _, state = kernel_attention(*short, EluPlusOne(), causal=False, return_state=True)
    kernel_attention(*short, EluPlusOne(), causal=False, state=state)
    kernel_attention(*short, EluPlusOne(), causal=True)
    assert not calls
    kernel_attention(*short, EluPlusOne(), causal=False)
    assert len(calls) == 1
    # One graph serves lengths on both sides of the limit.
    compiled = torch.compile(
        lambda *x: kernel_attention(*x, EluPlusOne(), causal=False), backend="eager", dynamic=True
    )
    compiled(*short)
    assert len(calls) == 1


@pytest.mark.parametrize("features, values", [(256, 64), (64, 64), (5, 4)])
def test_the_limit_is_where_products_are_as_many(features, values):
    def products(length):
        return length * length * (features + values), 2 * length * features * values

    for length in range(1, 300):
        by_pairs, by_sums = products(length)
        assert pairs_are_fewer(length, length, features, values) == (by_pairs < by_sums)
    assert not pairs_are_fewer(1, 10_000, features, values)  # a long memory is read piece by piece
