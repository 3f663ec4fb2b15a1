"""Hedgehog, T2R and LoLCATs: how they start, swaps of trained models, and long texts in pieces."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.conversion import swap_components
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.linear import window
from hf_xformers.variants import family
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    in_pieces,
    make_context,
    run_layers,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
LOLCATS = {"type": "lolcats", "chunk_size": 2, "window": 9}
SINKS = {"type": "lolcats", "window": 3, "chunk_size": 4, "sinks": 2, "affine": True, "gamma": 0.8}


def test_starts_and_swaps():
    """Maps start as the identity; projections of the source stay; inside its window a swap to LoLCATs changes
    nothing."""
    torch.manual_seed(0)
    fields = {**GEOMETRY, "position": "rotary", "num_key_value_heads": 2, "initializer_range": 0.3}
    fields["attention"] = {"type": "dense", "bias": False}
    source = family("xformer")["ForCausalLM"](XFormerConfig(**fields)).eval()
    ids = torch.randint(0, 50, (2, 12))
    for name in ("hedgehog", "t2r", "lolcats"):
        model, report = swap_components(source, attention=name, measure=False)
        layer = model.model.trunk.layers[1].attention
        maps = layer.feature_map if name == "t2r" else layer.key_map
        assert torch.equal(maps.weight, torch.eye(D).expand(HEADS, D, D)) and not maps.bias.any()
        before = source.model.trunk.layers[1].attention
        assert layer.q_proj.bias is None and torch.equal(layer.q_proj.weight, before.q_proj.weight)
        assert all(("map" in entry or "mixing" in entry) for entry in report.new) and not report.dropped
        with torch.no_grad():
            moved = (model(ids).logits - source(ids).logits).abs().max()
        assert (moved < 1e-5) if name == "lolcats" else (moved > 1e-3)


def test_rows_of_a_wide_map_differ():
    """Alike, they would have the same gradients for ever."""
    for name, features in (("hedgehog", 2 * D + 1), ("t2r", 3 * D)):
        config = XFormerConfig(**GEOMETRY, attention={"type": name, "num_features": features})
        model = family("xformer")["ForMaskedLM"](config)
        layer = model.model.trunk.layers[0].attention
        weight = (layer.feature_map if name == "t2r" else layer.query_map).weight[0]
        assert torch.equal(weight[:D], torch.eye(D)) and len(weight.round(decimals=4).unique(dim=0)) == features
        close(weight[D : 2 * D] @ weight[D : 2 * D].mT, torch.eye(D), 1e-5)


def test_a_performer_estimates_turned_scores():
    """Rotary positions turn queries and keys before the random features: with many of them weights come near those of
    softmax attention."""
    fields = {**GEOMETRY, "position": "rotary", "attention": "dense"}
    torch.manual_seed(0)
    source = family("xformer")["ForCausalLM"](XFormerConfig(**fields)).eval()
    features = {"type": "performer", "num_features": 4096}
    model, _ = swap_components(source, attention=features, measure=False)
    ids = torch.randint(0, 50, (1, 9))
    with torch.no_grad():
        close(model(ids).logits, source(ids).logits, 1e-3)


def test_a_text_longer_than_its_cache_began_with():
    """The window of a state that began with fewer tokens than it holds."""
    (layer,) = build_layers(LOLCATS, causal=True)
    states = vectors(1, 30)
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(30, True))[0].output
        close(in_pieces([layer], states, None, (2, 3, 20, 1, 4))[0], expected)
        cache = make_cache(layer.config)
        run_layers([layer], states, make_context(30, True), cache=cache)
    assert cache.layers[0].state["key"].shape[2] == 8


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_in_turn_as_at_once(causal, monkeypatch):
    """Without gradients a long text is read by a few chunks at a time, which takes less memory."""
    (layer,) = build_layers(SINKS, causal=causal, num_key_value_heads=2)
    states, mask, calls = vectors(2, 23), torch.ones(2, 23).bool(), []
    mask[0, :7] = False
    context = make_context(23, causal, padding_mask=mask)
    expected = run_layers([layer], states, context)[0].output.detach()
    once = window._Mix.__call__
    monkeypatch.setattr(window._Mix, "__call__", lambda *args: calls.append(args[1].shape[2]) or once(*args))
    pairs = 2 * HEADS * 4 * (8 if causal else 12)  # of a chunk: two rows, chunks of four tokens
    monkeypatch.setattr(window, "_PAIRS_AT_ONCE", 2 * pairs)
    with torch.no_grad():
        found = run_layers([layer], states, context)[0].output
    assert calls == [2, 2, 2]
    close(found, expected, 1e-12)
