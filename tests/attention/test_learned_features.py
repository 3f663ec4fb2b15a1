"""Hedgehog, T2R and LoLCATs against their equations, one query and one key at a time."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.conversion import swap_components
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.linear import window
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from hf_xformers.variants import family
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPECS = {
    "hedgehog": {"type": "hedgehog", "chunk_size": 4},
    "hedgehog_wide": {"type": "hedgehog", "num_features": 6, "chunk_size": 4, "scale": 0.5},
    "t2r": {"type": "t2r", "chunk_size": 4, "num_features": 7},
    "supra": {"type": "t2r", "normalization": "output_norm", "chunk_size": 4},
    "lolcats": {"type": "lolcats", "window": 3, "chunk_size": 4},
    "lolcats_short": {"type": "lolcats", "window": 1, "chunk_size": 2, "scale": 0.7},
    "lolcats_long": {"type": "lolcats", "window": 9, "chunk_size": 2},
    "lolcats_sinks": {"type": "lolcats", "window": 3, "chunk_size": 4, "sinks": 2, "affine": True, "gamma": 0.8},
    "lolcats_chunks": {"type": "lolcats", "window": 5, "chunk_size": 2, "sinks": 1},
    "lolcats_many_sinks": {"type": "lolcats", "window": 2, "chunk_size": 2, "sinks": 5},
}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("name", SPECS)


def features(layer, name, head, x, side):
    """Of one vector, for one head."""
    root = 1.0 if layer.spec.scale is None or name.startswith("lolcats") else layer.spec.scale**0.5
    maps = layer.feature_map if name in ("t2r", "supra") else getattr(layer, f"{side}_map")
    y = [float(row @ (root * x) + bias) for row, bias in zip(maps.weight[head], maps.bias[head])]
    if name in ("t2r", "supra"):
        return torch.tensor([max(value, 0.0) for value in y], dtype=torch.float64)
    found = []
    for sign in (1, -1):
        total = sum(math.exp(sign * value) for value in y)
        found += [math.exp(sign * value) / total for value in y]
    return torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def by_hand(layer, name, states, allowed, memory=None, turn=lambda x: x, mask=None):
    read = states if memory is None else memory
    q, k = turn(split_heads(layer.q_proj(states), D)), turn(split_heads(layer.k_proj(read), D))
    v = split_heads(layer.v_proj(read), D)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    allowed = allowed.expand(batch, HEADS, queries, keys)
    real = torch.ones(batch, keys).bool() if mask is None else mask
    weights = torch.zeros(allowed.shape, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        phi_q = features(layer, name, h, q[b, h, i], "query")
        seen = [j for j in range(keys) if allowed[b, h, i, j]]
        first = real[b].nonzero()[: getattr(layer.spec, "sinks", 0), 0].tolist()
        near = [j for j in seen if name.startswith("lolcats") and (abs(i - j) < layer.spec.window or j in first)]
        scale = layer.spec.scale if layer.spec.scale is not None else D**-0.5
        scores = {j: float(q[b, h, i] @ k[b, h, j]) * scale for j in near}
        for j in seen:
            if j in scores:
                gamma = 1 / (1 + math.exp(-float(layer.mixing[h])))
                weights[b, h, i, j] = gamma * math.exp(scores[j] - max(scores.values()))
            else:
                weights[b, h, i, j] = float(phi_q @ features(layer, name, h, k[b, h, j], "key"))
                if getattr(layer.spec, "affine", False):
                    weights[b, h, i, j] /= 1 + math.exp(float(layer.mixing[h]))
    total = weights.sum(-1, keepdim=True) + (layer.spec.eps if name in ("t2r", "supra") else 0.0)
    weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0)
    output = weights @ v
    if name == "supra":  # the norm's own small number is all that tells whether a denominator was there
        output = output / (output.square().mean(-1, keepdim=True) + layer.config.layer_norm_eps).sqrt()
        output = output * layer.output_norm[None, :, None]
    return layer.o_proj(output.transpose(1, 2).flatten(2)), weights


@each_spec
@each_path
@pytest.mark.parametrize("causal", [False, True])
def test_equation(name, implementation, causal):
    (layer,) = build_layers(SPECS[name], causal=causal, num_key_value_heads=2)
    for length, mask in ((6, None), (6, PADDING), (13, None)):
        states = vectors(4 if length == 6 else 1, length)
        context = make_context(length, causal, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, name, states, allowed_pairs(length, causal, mask), mask=mask)
        close(result.output.detach(), output)
        if implementation == "eager":
            close(result.weights.detach(), weights)


@each_path
@pytest.mark.parametrize("name", ["hedgehog", "t2r", "supra"])
def test_cross_attention(name, implementation):
    (layer,) = build_layers(SPECS[name], cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, memory_padding_mask=PADDING, implementation=implementation)
    (result,) = run_layers([layer], states, context, memory)
    expected, _ = by_hand(layer, name, states, PADDING[:, None, None, :].expand(4, 1, 3, 6), memory)
    close(result.output.detach(), expected)


@each_path
@pytest.mark.parametrize("name", ["hedgehog", "t2r", "lolcats"])
def test_rotary_turns_queries_and_keys(name, implementation):
    """Before the map: a pair of tokens weighs the same wherever the text begins."""
    (layer,) = build_layers(SPECS[name], causal=True)
    states = vectors(2, 6)
    for start in (0, 5):
        turn = RotaryPosition(D, RotarySpec()).rotation(torch.arange(start, start + 6)[None], states)
        context = make_context(6, True, implementation=implementation)
        context.shared["rotation"] = turn
        (result,) = run_layers([layer], states, context)
        expected, _ = by_hand(layer, name, states, allowed_pairs(6, True), turn=turn)
        close(result.output.detach(), expected, 1e-6)


@each_spec
def test_token_by_token(name):
    """With a cache in pieces as at once; padding on the left leaves no trace; the state does not grow."""
    (layer,) = build_layers(SPECS[name], causal=True, num_key_value_heads=2)
    states, mask = vectors(2, 23), torch.ones(2, 23).bool()
    mask[0, :5] = False
    with torch.no_grad():
        for seen in (None, mask):
            expected = run_layers([layer], states, make_context(23, True, padding_mask=seen))[0].output
            for pieces in ((1,) * 23, (9, 1, 1, 1, 2, 7, 1, 1), (23,), (1, 22)):
                close(in_pieces(layer, states, pieces, seen)[0], expected)
        sizes = state_sizes(layer, vectors(1, 24), (10, 17, 24))
    assert len(set(sizes)) == 1


@each_spec
def test_no_future(name):
    (layer,) = build_layers(SPECS[name], causal=True)
    check_no_future(layer, vectors(2, 11))


@each_spec
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(name, causal):
    """Those of the fast path are those of the literal one, for every parameter."""
    (layer,) = build_layers(SPECS[name], causal=causal)
    states, found = vectors(4, 11), []
    mask = torch.ones(4, 11).bool()
    mask[1, 6:], mask[2, :4], mask[3] = False, False, False
    for implementation in ("eager", "sdpa"):
        layer.zero_grad()
        given = states.clone().requires_grad_()
        context = make_context(11, causal, padding_mask=mask, implementation=implementation)
        run_layers([layer], given, context)[0].output[mask].square().sum().backward()
        found.append({"states": given.grad} | {key: value.grad.clone() for key, value in layer.named_parameters()})
    for key, value in found[0].items():
        close(found[1][key], value, 1e-8)
        assert value.isfinite().all()


@pytest.mark.parametrize("name", ["hedgehog", "t2r", "lolcats"])
def test_what_is_kept(name):
    """Nothing in proportion to T x T."""
    kept = []
    for length in (256, 512, 1024):
        (layer,) = build_layers({"type": name, **({"window": 8, "chunk_size": 8} if name == "lolcats" else {})})
        kept.append(sum(saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))))
    assert kept[2] < 2.3 * kept[1] < 5.2 * kept[0]


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


def test_refusals():
    for fields, message in (
        ({"type": "hedgehog", "num_features": 0}, "`num_features` >= 1, got 0"),
        ({"type": "t2r", "num_features": 0}, "`num_features` >= 1, got 0"),
        ({"type": "t2r", "eps": -1.0}, "`eps` >= 0, got -1"),
        ({"type": "hedgehog", "scale": 0}, "`scale` > 0, got 0"),
        ({"type": "lolcats", "window": 0}, "`window` >= 1, got 0"),
        ({"type": "lolcats", "gamma": 1.0}, "`gamma` between 0 and 1, got 1"),
        ({"type": "lolcats", "chunk_size": 0}, "`chunk_size` >= 1, got 0"),
        ({"type": "lolcats", "sinks": -1}, "`sinks` >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention=fields)


ROTARY = {"position": "rotary", "residual": "pre_ln", "num_key_value_heads": 2}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "case", mixes({name: {"attention": SPECS[name], **ROTARY} for name in ("hedgehog", "supra", "lolcats")}), ids=str
)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    "case", mixes({"lolcats": {"attention": SPECS["lolcats"], "num_hidden_layers": 1}}, ("decoder",)), ids=str
)
def test_compile(case):
    check_compile(case)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_in_turn_as_at_once(causal, monkeypatch):
    """Without gradients a long text is read by a few chunks at a time, which takes less memory."""
    (layer,) = build_layers(SPECS["lolcats_sinks"], causal=causal, num_key_value_heads=2)
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


def test_a_text_longer_than_its_cache_began_with():
    """The window of a state that began with fewer tokens than it holds."""
    (layer,) = build_layers(SPECS["lolcats_long"], causal=True)
    states = vectors(1, 30)
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(30, True))[0].output
        close(in_pieces(layer, states, (2, 3, 20, 1, 4))[0], expected)
        cache = make_cache(layer.config)
        run_layers([layer], states, make_context(30, True), cache=cache)
    assert cache.layers[0].state["key"].shape[2] == 8
