"""Predictive and evolving attention: the equations with the convolution as a sum of shifts, limits, strictness."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.predictive_attention import ScoreRowsLayer
from hf_xformers.attention.shared.score_chain import Link
from hf_xformers.core.cache import XFormerCache
from tests.attention.score_helpers import GEOMETRY, HEADS, build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close

CHAIN = Link, ("predictive", False)

PAT = {"form": "pat", "alpha": 0.7}


def build(count=3, causal=False, cross=False, config=None, **fields):
    spec = {"type": "predictive_attention", **fields}
    if not cross:
        return build_layers(spec, count, causal, **(config or {}))
    given = {"is_decoder": True, "is_encoder_decoder": True, "attention": spec, "cross_attention": spec}
    made = XFormerConfig(**GEOMETRY, **given)
    torch.manual_seed(0)
    layers = [made.cross_attention.build(made, layer_idx=index, cross=True).double().eval() for index in range(count)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.data.normal_(std=0.3)
    return layers


def own_scores(layers, states):
    parts = [(split_heads(layer.q_proj(states), 4), split_heads(layer.k_proj(states), 4)) for layer in layers]
    return [q @ k.mT / 2 for q, k in parts]


def test_running_averages():
    """Without a convolution `evolving` halves what it carries; with one that copies, `pat` averages exponentially."""
    states, context = vectors(2, 6), make_context(6)
    layers = build(alpha=0.0, beta=0.5)
    first, second, third = own_scores(layers, states)
    found = run_layers(layers, states, context, residual=False)[-1].states[CHAIN].scores
    close(found, first / 4 + second / 4 + third / 2)
    layers = build(**PAT)
    for layer in layers[1:]:
        with torch.no_grad():
            layer.score_conv.conv.weight.zero_()[:, :, 1, 1] = torch.eye(HEADS)
            layer.score_conv.conv.bias.zero_()
    first, second, third = own_scores(layers, states)
    found = run_layers(layers, states, context, residual=False)[-1].states[CHAIN].scores
    close(found, 0.3 * (0.3 * first + 0.7 * second) + 0.7 * third)


def leak(layers):
    """How much earlier outputs change when the last two tokens do."""
    states, changed = vectors(1, 9), vectors(1, 9)
    changed[:, 7:] = vectors(1, 2, seed=8)
    one, other = (run_layers(layers, x, make_context(9, True))[-1].output[:, :7] for x in (states, changed))
    return (one - other).abs().max().item()


def test_nothing_of_later_tokens(monkeypatch):
    """Neither hiding later keys in the image nor reading earlier rows alone is enough."""
    assert leak(build(causal=True)) == 0.0
    rows_alone = build(causal=True)
    monkeypatch.setattr(type(rows_alone[0]), "_visible", lambda self, scores, context: scores)
    assert leak(rows_alone) > 1e-4
    monkeypatch.undo()
    hiding_alone = build(causal=True)
    for layer in hiding_alone[1:]:
        layer.score_conv.above, layer.score_conv.conv.padding = 0, (1, 1)
    assert leak(hiding_alone) > 1e-4


@pytest.mark.parametrize("fields", [{}, PAT, {"kernel": 5}], ids=str)
def test_cache(fields):
    """Token by token and in pieces as at once, left padding included; what is kept beside keys and values."""
    layers, states = build(causal=True, **fields), vectors(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    expected = run_layers(layers, states, make_context(12, True, padding_mask=mask))[-1].output
    cache, found, past = XFormerCache([ScoreRowsLayer() for _ in layers]), [], 0
    for size in (1, 4, 1, 1, 5):
        context = make_context(size, True, past=past, padding_mask=mask[:, : past + size])
        found.append(run_layers(layers, states[:, past : past + size], context, cache=cache)[-1].output)
        past += size
    close(torch.cat(found, 1)[mask], expected[mask])
    kept = {name: rows.shape for name, rows in cache.layers[2].rows.items()}
    assert kept == {CHAIN[1]: (2, HEADS, fields.get("kernel", 3) - 1, 12)} and not cache.layers[0].rows
    cache.reorder_cache(torch.tensor([1, 1]))
    rows = cache.layers[2].rows[CHAIN[1]]
    assert torch.equal(rows[0], rows[1])
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        cache.layers[2].crop(-1)


def test_cache_without_a_place():
    from transformers.cache_utils import DynamicCache

    with pytest.raises(ValueError, match="keeps rows of scores.*DynamicCache has no place for"):
        run_layers(build(causal=True), vectors(1, 3), make_context(3, True), cache=DynamicCache())


def test_convolution_stays_in_single_precision():
    layers = [layer.to(torch.bfloat16) for layer in build()]
    results = run_layers(layers, vectors(1, 6).to(torch.bfloat16), make_context(6))
    assert layers[1].score_conv.conv.weight.dtype == torch.float32
    assert results[-1].states[CHAIN].scores.dtype == torch.float32
    assert results[-1].output.dtype == torch.bfloat16
