"""ProbSparse attention against loops over queries and keys, transformers' module, and its limits."""

import math

import pytest
import torch

import tests.common.test_outputs as outputs
import tests.common.test_padding as padding
from hf_xformers import XFormerConfig
from hf_xformers.ops.prob_sparse import budget, budgets, measured, sampled_keys
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPARSE = {"type": "informer", "sampling_factor": 1}
PAPER = {**SPARSE, "causal_form": "paper"}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def sample_by_hand(place, number, count, seed):
    """The counter-based generator in whole numbers of Python."""
    found = []
    for k in range(number):
        x = (place * 0x9E3779B1 + k * 0x85EBCA77 + seed) % 2**32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        found.append(((x ^ (x >> 16)) * count) >> 32)
    return found


def one_text(query, key, value, factor, seed, causal=False, total=True):
    """One text and head [n, d], query by query -> output [n, d] and the queries that attend."""
    n = len(query)
    number = min(max(factor * math.ceil(math.log(n)), 1), n)
    measure = []
    for i in range(n):
        scores = [float(query[i] @ key[j]) for j in sample_by_hand(i, number, n, seed)]
        measure.append(max(scores) - sum(scores) / n)
    active = sorted(range(n), key=lambda i: -measure[i])[:number]
    rows = []
    for i in range(n):
        last = i + 1 if causal else n
        if i in active:
            weights = torch.softmax(key[:last] @ query[i] / math.sqrt(D), dim=0)
        else:
            weights = torch.ones(last).double() / (1 if causal and total else last)
        rows.append(weights @ value[:last])
    return torch.stack(rows), active


@each_path
@pytest.mark.parametrize(
    ("spec", "causal"), [(SPARSE, False), (PAPER, True), ({**PAPER, "causal_context": "mean"}, True)]
)
def test_equation(spec, causal, implementation):
    (layer,) = build_layers(spec, causal=causal, use_cache=False)
    x = vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, causal, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], x, context)
        query, key, value = (split_heads(p(x), D).detach() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = torch.zeros(4, 6, HEADS, D).double()
        for b in range(4):
            real = torch.ones(6).bool() if mask is None else mask[b]
            if not real.any():
                continue
            for h in range(HEADS):
                inputs = (part[b, h, real] for part in (query, key, value))
                seed = layer.spec.seed * 1009
                found, active = one_text(*inputs, 1, seed, causal, spec.get("causal_context") != "mean")
                expected[b, real, h] = found
                assert len(active) < max(int(real.sum()), 2)
        close(result.output, layer.o_proj(expected.flatten(2)))


def test_budgets():
    counts = torch.tensor([0, 1, 2, 3, 7, 8, 20, 21, 128, 512, 2048, 4096])
    assert budgets(counts, 5).tolist() == [budget(int(n), 5) for n in counts]
    assert [budget(n, 5) for n in (128, 512, 2048, 4096)] == [25, 35, 40, 45]


def test_sample_is_uniform():
    """Counts of 40 000 draws among 20 keys: chi square with 19 degrees of freedom, mean 19, deviation 6.2."""
    drawn = sampled_keys(torch.arange(1000), 40, torch.full((1000,), 20), 7)
    counts = torch.bincount(drawn.flatten(), minlength=20).double()
    assert len(counts) == 20 and ((counts - 2000) ** 2 / 2000).sum() < 45
    assert drawn.tolist()[3] == sample_by_hand(3, 40, 20, 7)


def test_equal_keys_measure_nothing():
    query = torch.randn(2, 3, 9, D).double()
    key = torch.randn(2, 3, 1, D).double().expand(-1, -1, 9, -1)
    close(measured(query, key, None, 9, 0), torch.zeros(2, 3, 9).double())  # as many samples as keys: max - mean


@each_path
@pytest.mark.parametrize("causal", [False, True])
def test_enough_queries_are_exact_attention(causal, implementation):
    """u = T: dense attention with the same weights."""
    spec = {**PAPER, "sampling_factor": 9}
    (layer,) = build_layers(spec, causal=causal, use_cache=False)
    (dense,) = build_layers("dense", causal=causal)
    dense.load_state_dict(layer.state_dict())
    x = vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, causal, padding_mask=mask, implementation=implementation)
        real = torch.ones(4, 6).bool() if mask is None else mask
        (found,), (expected,) = (run_layers([module], x, context) for module in (layer, dense))
        close(found.output[real], expected.output[real])


def test_lazy_rows_are_the_mean():
    """Exactly u rows of each head differ from the mean of all values."""
    (layer,) = build_layers({"type": "informer", "sampling_factor": 2})
    x = vectors(2, 60)
    query, key, value = (split_heads(p(x), D) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    output, _ = layer.attend(query, key, value, make_context(60))
    same = torch.isclose(output.transpose(1, 2), value.mean(2, keepdim=True), rtol=1e-9, atol=1e-12).all(-1)
    assert ((~same).sum(-1) == 2 * math.ceil(math.log(60))).all()


@pytest.mark.parametrize("masked", [False, True])
def test_transformers_module(masked, monkeypatch):
    """transformers' module with the same weights, where it samples every key once: u of all queries attend. It counts
    ceil(ln(1 + n)), which is ours at n = 20, and adds up context in float32."""
    from transformers.models.informer import modeling_informer as theirs

    monkeypatch.setattr(torch, "randint", lambda low, high, shape: torch.arange(shape[0]))
    spec = {"type": "informer", "sampling_factor": 2, "causal_form": "paper"}
    (layer,) = build_layers(spec, causal=masked, use_cache=False)
    twin = theirs.InformerProbSparseAttention(WIDTH, HEADS, is_decoder=masked, sampling_factor=2).double().eval()
    weights = {name.replace("o_proj", "out_proj"): weight for name, weight in layer.state_dict().items()}
    twin.load_state_dict(weights)
    x = vectors(2, 19)
    mask = torch.full((19, 19), -1e30).double().triu(1).expand(2, 1, -1, -1) if masked else None
    expected, _ = twin(x, attention_mask=mask)

    def all_keys(query, key, mask, factor, seed):
        scores = query @ key.mT
        return scores.amax(-1) - scores.sum(-1) / key.shape[2]

    monkeypatch.setattr("hf_xformers.attention.informer.measured", all_keys)
    (found,) = run_layers([layer], x, make_context(19, masked))
    close(found.output, expected, 1e-6 if masked else 1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_grouped_keys_and_padding(side):
    """With fewer keys than heads, where a part of the queries attends; the family has the rest of the contract."""
    (case,) = mixes({"sparse": {"attention": SPARSE, "num_key_value_heads": 2}}, ("encoder",))
    padding.test_padding_changes_nothing(case, side)
    padding.test_one_by_one(case, side)
    outputs.test_eager_equals_fast(case, 13)


def test_memory_is_linear():
    """No tensor of T x T is kept, and the selection keeps nothing."""
    (layer,) = build_layers(SPARSE)
    x = vectors(1, 512).requires_grad_()
    assert saved_sizes(lambda: run_layers([layer], x, make_context(512)))[0] <= 512 * 7 * HEADS


def test_refusals():
    with pytest.raises(ValueError, match="no causal form"):
        XFormerConfig(**GEOMETRY, attention="informer", is_decoder=True)
    with pytest.raises(ValueError, match="cannot generate.*use_cache=False"):
        XFormerConfig(**GEOMETRY, attention=PAPER, is_decoder=True)
    assert XFormerConfig(**GEOMETRY, attention=PAPER, is_decoder=True, use_cache=False).attention.causal
    with pytest.raises(ValueError, match="sampling_factor"):
        XFormerConfig(**GEOMETRY, attention={"type": "informer", "sampling_factor": 0})
