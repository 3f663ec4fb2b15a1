"""The bucketed engine against loops over the definition, and its promises: precision, dropout, memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_xformers.ops.bucketed import attention, op
from hf_xformers.ops.bucketed.attention import (
    Chunks,
    Recent,
    bucketed_attention,
    bucketed_reference,
    clustered_attention,
    clustered_reference,
)

SETS = [
    Recent(0),
    Recent(2),
    Recent(5),
    Recent(40),
    Chunks(4),
    Chunks(4, 1, 1),
    Chunks(5, 2, 0, causal=True),
    Chunks(3, 1, 1, own_label=False),
    Chunks(4, own_label=False, causal=True),
]
RINGS = [Chunks(4, own_label=False, causal=True, circular=True), Chunks(3, 2, 1, own_label=False, circular=True)]


def inputs(length, rounds=2, labels=3, batch=2, heads=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, 4)
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.randint(0, labels, (batch, heads, rounds, length), generator=generator)


def key_counts(sets, labels, real, query):
    """How often each key is in a query's sets, by the definition; labels: lists [rounds][T], real: list of T."""
    length, counts = len(real), [0] * len(real)
    if not real[query]:
        return counts
    places = []  # places[a][t]: place of token t in round a
    for row in labels:
        order = sorted(range(length), key=lambda t, row=row: (not real[t], row[t], t))
        places.append([order.index(t) for t in range(length)])
    for a, row in enumerate(labels):
        if isinstance(sets, Recent):
            mates = [t for t in range(query) if row[t] == row[query] and real[t]]
            for t in [*mates[len(mates) - min(sets.window, len(mates)) :], query]:
                counts[t] += 1
            continue
        chunks = math.ceil(length / sets.size)
        own = places[a][query] // sets.size
        for b, t in itertools.product(range(len(labels)), range(length)):
            away = places[b][t] // sets.size - own + chunks * (b - a)
            if sets.circular:
                ring = chunks * len(labels)
                near = any((own + shift + a * chunks) % ring == (own + away + a * chunks) % ring
                           for shift in range(-sets.before, sets.after + 1))  # fmt: skip
            else:
                near = a == b and -sets.before <= away <= sets.after
            if near and real[t] and (row[t] == row[query] or not sets.own_label) and (t <= query or not sets.causal):
                counts[t] += 1
    return counts


def by_hand(q, k, v, labels, sets, key_padding_mask, distinct, own_key_last, scale=0.5):
    out = torch.zeros_like(v)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        real = [True] * q.shape[2] if key_padding_mask is None else key_padding_mask[b].tolist()
        counts = key_counts(sets, labels[b, h].tolist(), real, i)
        total, sum_ = 0.0, torch.zeros_like(v[b, h, i])
        exponents = {j: scale * float(q[b, h, i] @ k[b, h, j]) for j, count in enumerate(counts) if count}
        if own_key_last and i in exponents:
            exponents[i] = -1e5
        top = max(exponents.values(), default=0.0)
        for j, exponent in exponents.items():
            weight = (1 if distinct else counts[j]) * math.exp(exponent - top)
            total, sum_ = total + weight, sum_ + weight * v[b, h, j].detach()
        if total:
            out[b, h, i] = sum_ / total
    return out


@pytest.mark.parametrize("own_key_last", [False, True])
@pytest.mark.parametrize("sets", SETS + RINGS, ids=str)
def test_reference_is_the_definition(sets, own_key_last):
    for length, distinct in itertools.product((1, 2, 11), (False, True)):
        if distinct and sets in RINGS:
            continue
        q, k, v, labels = inputs(length)
        valid = torch.arange(length) != 3
        valid = torch.stack([valid, torch.zeros_like(valid)])
        for mask in (None, valid):
            options = {"key_padding_mask": mask, "distinct": distinct, "own_key_last": own_key_last}
            expected = by_hand(q, k, v, labels, sets, **options)
            out, weights = bucketed_reference(q, k, v, labels, sets, scale=0.5, **options)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(weights @ v, out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("sets", SETS + RINGS, ids=str)
def test_engine_equals_reference(sets, rounds):
    """Output and gradients, at any length, with padding anywhere and rows of padding alone."""
    for length, masked, own_key_last in itertools.product((1, 5, 16, 37), (False, True), (False, True)):
        if (length + masked + own_key_last + rounds // 2) % 2:
            continue  # any three of these in all their combinations
        q, k, v, labels = inputs(length, rounds)
        valid = None
        if masked:
            valid = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.4
            valid[1] = False
        for distinct in (False,) if sets in RINGS else (False, True):
            options = {"key_padding_mask": valid, "distinct": distinct, "own_key_last": own_key_last}
            out = bucketed_attention(q, k, v, labels, sets, num_labels=3, **options)
            expected, _ = bucketed_reference(q, k, v, labels, sets, **options)
            slope = torch.randn_like(out)
            found = torch.autograd.grad(out, (q, k, v), slope)
            for one, other in zip((out, *found), (expected, *torch.autograd.grad(expected, (q, k, v), slope))):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_alone_gives_zeros(dtype):
    q, k, v, labels = inputs(9, dtype=dtype)
    valid = torch.zeros(2, 9, dtype=torch.bool)
    out = bucketed_attention(q, k, v, labels, Recent(3), num_labels=3, key_padding_mask=valid, own_key_last=True)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all((x == 0).all() for x in (out, *found))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_precision(dtype, tolerance):
    q, k, v, labels = inputs(33, dtype=dtype)
    out = bucketed_attention(q, k, v, labels, Recent(7), num_labels=3, own_key_last=True)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, _ = bucketed_reference(*wide, labels, Recent(7), own_key_last=True)
    slopes = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    for one, other in zip((out, *found), (expected, *slopes)):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance * max(1, float(other.abs().max()))
        )


def test_cutting_the_work_changes_nothing(monkeypatch):
    """Chunks of the computation, groups of rows and segments of chunks."""
    q, k, v, labels = inputs(50, rounds=3)
    expected = bucketed_attention(q, k, v, labels, Recent(9), num_labels=3)
    slopes = torch.autograd.grad(expected.sum(), (q, k, v))
    for at_once in (1, 300, 5000):
        monkeypatch.setitem(op._SCORES_AT_ONCE, "cpu", at_once)
        for size in (1, 4, 7, 64):
            monkeypatch.setattr(attention, "default_chunk", lambda window, length, size=size: min(size, length))
            out = bucketed_attention(q, k, v, labels, Recent(9), num_labels=3)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            for one, other in zip(torch.autograd.grad(out.sum(), (q, k, v)), slopes):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_codes_beyond_float32_stay_exact(monkeypatch):
    """Very many labels: codes are kept in float64."""
    q, k, v, labels = inputs(40, rounds=2)
    expected = bucketed_attention(q, k, v, labels, Recent(3), num_labels=3)
    many = labels * 3_000_017
    torch.testing.assert_close(bucketed_attention(q, k, v, many, Recent(3), num_labels=9_000_051), expected)
    many = bucketed_attention(q, k, v, many, Chunks(4), num_labels=9_000_051)
    torch.testing.assert_close(many, bucketed_attention(q, k, v, labels, Chunks(4), num_labels=3))


def test_dropout_is_replayed_and_unbiased():
    q, k, v, labels = inputs(16, rounds=2)

    def run(values, seed=5):
        torch.manual_seed(seed)
        return bucketed_attention(q, k, values, labels, Recent(4), num_labels=3, dropout=0.3)

    # The result is linear in the values, so the gradient gives the result back if both saw the same mask.
    out = run(v)
    slope = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, v, slope)
    torch.testing.assert_close((found * v).sum(), (slope * out).sum(), rtol=1e-12, atol=1e-12)
    assert torch.equal(run(v), out) and not torch.equal(run(v, seed=6), out)
    # Directional derivative with respect to queries and keys, under one mask.
    step, (to_q, to_k) = 1e-6, torch.autograd.grad(run(v), (q, k), slope)
    moves = [torch.randn_like(q), torch.randn_like(k)]
    ends = []
    for sign in (1, -1):
        torch.manual_seed(5)
        moved = (q + sign * step * moves[0], k + sign * step * moves[1])
        ends.append((bucketed_attention(*moved, v, labels, Recent(4), num_labels=3, dropout=0.3) * slope).sum())
    expected = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close((to_q * moves[0]).sum() + (to_k * moves[1]).sum(), expected, rtol=1e-6, atol=1e-7)
    mean = torch.stack([run(v, seed) for seed in range(300)]).mean(0)
    exact = bucketed_attention(q, k, v, labels, Recent(4), num_labels=3)
    assert (mean - exact).abs().mean() < 0.05


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().size() > 0:
                self.most = max(self.most, leaf.untyped_storage().size() // leaf.element_size())
        return result


def test_no_tensor_grows_with_the_square_of_the_length():
    most = {}
    for length in (2048, 8192):
        q, k, v, labels = (x.detach() for x in inputs(length, rounds=2, labels=32, batch=1, dtype=torch.float32))
        layout = op.Layout(32, 1, 0, 0, 32, False, False, True, True)
        plan = op.sorted_codes(labels, None, 32, 32, layout, True)
        rest = (None, None, layout.to_list(), 0.5, 0.0)
        with _Largest() as seen:
            out, lse = op._forward(q, k, v, *plan, *rest)
            op._backward(torch.ones_like(out), out, lse, q, k, v, *plan, *rest)
        most[length] = seen.most
    assert most[8192] <= max(4 * most[2048], 2**18)
    assert most[8192] < 8192 * 8192 / 100


def test_refusals():
    q, k, v, labels = inputs(6)
    for changes, text in (
        ({"key": k[:, :, :4]}, "every token is a query and a key"),
        ({"labels": labels[:, :, :, :4]}, "labels must be"),
        ({"labels": labels.double()}, "give integers"),
        ({"key_padding_mask": torch.ones(2, 6)}, "boolean mask"),
        ({"dropout": 1.0}, "not a probability"),
        ({"sets": RINGS[0]}, "distinct=False"),
    ):
        arguments = {"query": q, "key": k, "value": v, "labels": labels, "sets": Recent(2), "num_labels": 3, **changes}
        with pytest.raises(ValueError, match=text):
            bucketed_attention(**arguments)
    with pytest.raises(ValueError, match="window >= 0"):
        Recent(-1)
    with pytest.raises(ValueError, match="size >= 1"):
        Chunks(0)
    with pytest.raises(ValueError, match="own_label=False"):
        Chunks(4, circular=True)


# ------------------------------------------------------------------------------------------- clusters that choose


def clusters(length, count=3, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 2, count, length, generator=generator)
    return scores.topk(min(width, length)).indices.sort(-1).values


def clustered_by_hand(q, k, v, query_index, key_index, causal, query_valid, key_valid):
    out = torch.zeros_like(v[:, :, : q.shape[2]])
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        results = []
        for c in range(query_index.shape[2]):
            asks = [
                int(t) for n, t in enumerate(query_index[b, h, c]) if query_valid is None or query_valid[b, h, c, n]
            ]
            keys = [int(t) for n, t in enumerate(key_index[b, h, c]) if key_valid is None or key_valid[b, h, c, n]]
            if i not in asks:
                continue
            keys = [t for t in keys if t <= i or not causal]
            if keys:
                results.append(torch.softmax(q[b, h, i] @ k[b, h, keys].T / 2, 0) @ v[b, h, keys])
            else:
                results.append(torch.zeros_like(v[b, h, 0]))
        if results:
            out[b, h, i] = torch.stack(results).mean(0)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_clusters_equal_a_loop(causal, shared, masked):
    for length in (1, 3, 12):
        q, k, v, _ = inputs(length)
        query_index = clusters(length)
        key_index = query_index if shared else clusters(length, seed=1)
        query_valid = key_valid = None
        if masked:
            query_valid = torch.rand(query_index.shape, generator=torch.Generator().manual_seed(2)) > 0.4
            key_valid = query_valid if shared else torch.rand(query_index.shape) > 0.4
            query_valid[1, 0], key_valid[1, 0] = False, False
        options = {"causal": causal, "query_valid": query_valid, "key_valid": key_valid}
        expected = clustered_by_hand(q, k, v, query_index, key_index, **options)
        literal, weights = clustered_reference(q, k, v, query_index, key_index, **options)
        out = clustered_attention(q, k, v, query_index, key_index, **options)
        for found in (out, literal, weights @ v):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        slope = torch.randn_like(out)
        for one, other in zip(
            torch.autograd.grad(out, (q, k, v), slope), torch.autograd.grad(literal, (q, k, v), slope)
        ):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_clusters_is_the_same_in_both_passes(causal):
    """Numerical derivatives of the function that a seed makes; no dropped weight, no difference from the mean."""
    q, k, v, _ = inputs(7)
    query_index, key_index = clusters(7), clusters(7, seed=1)

    def run(q, k, v, dropout=0.4):
        torch.manual_seed(0)
        return clustered_attention(q, k, v, query_index, key_index, causal=causal, dropout=dropout)

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert (run(q, k, v) - run(q, k, v, 0.0)).abs().max() > 1e-3
    ones = torch.ones_like(v)
    given = [x.repeat(3000, 1, 1, 1) for x in (q, k, ones, query_index, key_index)]
    many = clustered_attention(*given, causal=causal, dropout=0.4).unflatten(0, (3000, -1))
    assert (many.mean(0) - run(q, k, ones, 0.0)).abs().max() < 0.12


def test_clusters_of_heads_in_any_order_of_memory():
    """Heads beside each other, heads one after the other, and some heads of a larger tensor."""
    q, k, v, _ = inputs(12)
    index = clusters(12)
    expected = clustered_attention(q, k, v, index, index)
    beside = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    part = [torch.cat([x, x], 1).detach()[:, 2:].requires_grad_() for x in (q, k, v)]
    probe = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (q, k, v), probe)
    for tensors in (beside, part):
        found = clustered_attention(*tensors, index, index)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(found, tensors, probe), grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_clusters_in_half_precision():
    """Sums in float32, results in the inputs' type; autocast's type under autocast."""
    q, k, v, _ = inputs(12)
    index = clusters(12)
    expected = clustered_attention(q, k, v, index, index)
    halves = [x.detach().bfloat16() for x in (q, k, v)]
    exact = clustered_attention(*(x.double() for x in halves), index, index)
    found = clustered_attention(*halves, index, index)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        cast = clustered_attention(*(x.float() for x in (q, k, v)), index, index)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.double(), expected, rtol=0.05, atol=0.05)
