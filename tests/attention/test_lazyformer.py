"""LazyFormer: the shared map by its equation on every path, what it saves, its cache, and its limits."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.score_helpers import (
    GEOMETRY,
    PADDING,
    allowed_pairs,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

PATHS = {"literal": ("eager", "auto"), "weights": ("sdpa", "weights"), "projections": ("sdpa", "projections")}
each_path = pytest.mark.parametrize("path", PATHS)


def build(path="weights", count=5, causal=False, cross=False, config=None, **fields):
    more = {"is_encoder_decoder": True} if cross else {}
    spec = {"type": "lazyformer", "hand_on": PATHS[path][1], **fields}
    return build_layers(spec, count, causal, cross, **{"num_hidden_layers": count, **more, **(config or {})})


@torch.no_grad()
def by_hand(layers, states, allowed, memory=None, bias=0.0):
    """Outputs and weights of each layer: those that have queries make a map, the others use the last one."""
    outputs, maps = [], []
    for layer in layers:
        width, groups = layer.head_dim, layer.num_heads // layer.num_key_value_heads
        read = states if memory is None else memory
        if layer.q_proj is not None:
            q = split_heads(layer.q_proj(states), width)
            k = split_heads(layer.k_proj(read), width).repeat_interleave(groups, 1)
            maps.append(softmax_by_rows(torch.einsum("bhid,bhjd->bhij", q, k) / width**0.5 + bias, allowed))
        else:
            maps.append(maps[-1])
        v = split_heads(layer.v_proj(read), width).repeat_interleave(groups, 1)
        outputs.append(layer.o_proj(torch.einsum("bhij,bhjd->bihd", maps[-1], v).flatten(2)))
        states = states + outputs[-1]
    return outputs, maps


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"block_size": 9}, {"block_sizes": (1, 3, 1)}, {"config": {"num_key_value_heads": 2}}], ids=str
)
def test_equation(fields, causal, path):
    layers, states = build(path, causal=causal, **fields), vectors(4, 6)
    for mask in (None, PADDING):
        found = run_layers(layers, states, make_context(6, causal, padding_mask=mask, implementation=PATHS[path][0]))
        for one, other in zip(found, by_hand(layers, states, allowed_pairs(6, causal, mask))[0], strict=True):
            close(one.output.detach(), other)


def test_which_layers_have_queries():
    for fields, expected in (
        ({}, [True, False, True, False, True]),
        ({"block_size": 1}, [True] * 5),
        ({"block_size": 9}, [True, False, False, False, False]),
        ({"block_sizes": (1, 3, 1)}, [True, True, False, False, True]),
    ):
        assert [layer.q_proj is not None for layer in build(**fields)] == expected, fields


@each_path
def test_cross_attention(path):
    layers = build(path, cross=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, True, memory_padding_mask=PADDING, implementation=PATHS[path][0])
    found = run_layers(layers, states, context, memory)
    for one, other in zip(found, by_hand(layers, states, PADDING[:, None, None, :], memory)[0], strict=True):
        close(one.output.detach(), other)


@each_path
def test_bias_is_in_the_map(path):
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    layers, states = build(path), vectors(2, 6)
    context = make_context(6, implementation=PATHS[path][0])
    context.shared["score_bias"] = position
    bias = position.block(context.query_index, context.key_index).detach()
    expected = by_hand(layers, states, allowed_pairs(6, False), bias=bias)[0]
    for one, other in zip(run_layers(layers, states, context), expected, strict=True):
        close(one.output.detach(), other)


def test_blocks_of_one_layer_are_dense():
    layers, dense, states = build(block_size=1), build_layers("dense", 5), vectors(2, 6)
    for layer, plain in zip(layers, dense, strict=True):
        plain.load_state_dict(layer.state_dict())
    expected = run_layers(dense, states, make_context(6))
    for one, other in zip(run_layers(layers, states, make_context(6)), expected, strict=True):
        close(one.output, other.output)


def test_weights_given_out_are_shared():
    layers, states = build(), vectors(2, 6)
    found = run_layers(layers, states, make_context(6, output_attentions=True))
    for one, other in zip(found, by_hand(layers, states, allowed_pairs(6, False))[1], strict=True):
        close(one.weights.detach(), other)


def test_parameters_saved():
    def count(attention):
        return sum(p.numel() for p in XFormerModel(XFormerConfig(**GEOMETRY, attention=attention)).parameters())

    width = GEOMETRY["hidden_size"]
    assert count("dense") - count("lazyformer") == 2 * (width**2 + width)  # one of three layers is not the first
    assert count("dense") - count({"type": "lazyformer", "block_size": 3}) == 4 * (width**2 + width)


@each_path
def test_gradient_through_the_map(path):
    """The last layer of a block alone leads back to the first one's queries."""
    layers, states = build(path, count=3, block_size=3), vectors(1, 6)
    results = run_layers(layers, states, make_context(6, implementation=PATHS[path][0]), residual=False)
    (slope,) = torch.autograd.grad(results[-1].output.sum(), layers[0].q_proj.weight)
    assert slope.abs().max() > 1e-6


@each_path
def test_cache(path):
    layers, states = build(path, causal=True), vectors(2, 14)
    expected = by_hand(layers, states, allowed_pairs(14, True))[0][-1]
    cache, found, past = DynamicCache(), [], 0
    for size in (1, 5, 1, 1, 6):
        context = make_context(size, True, past=past, implementation=PATHS[path][0])
        found.append(run_layers(layers, states[:, past : past + size], context, cache=cache)[-1].output)
        past += size
    close(torch.cat(found, 1).detach(), expected)
    assert [layer.keys.shape[-1] for layer in cache.layers] == [4, 1, 4, 1, 4]


def test_long_texts_keep_no_map():
    layers = build("projections", count=2)
    for length in (600, 1200):
        largest = saved_sizes(lambda: run_layers(layers, vectors(1, length), make_context(length)))[0]
        assert largest <= length * 64
    auto = build("literal", count=2)[0]
    assert auto._keeps_weights(make_context(4), 1024, 1024) and not auto._keeps_weights(make_context(4), 1025, 1024)


@pytest.mark.parametrize("path", ["weights", "projections"])
def test_dropout_is_drawn_once(path):
    layers = build(path, count=2, config={"attention_probs_dropout_prob": 0.5})
    results = run_layers([layer.train() for layer in layers], vectors(1, 6), make_context(6))
    kept = results[0].streams["lazyformer_weights"]
    assert (kept == 0).any()
    value = split_heads(layers[1].v_proj(vectors(1, 6) + results[0].output), 4)
    close(results[1].output, layers[1].o_proj((kept @ value).transpose(1, 2).flatten(2)))


MIXES = {
    "lazy_blocks": {
        **{"attention": {"type": "lazyformer", "block_sizes": [1, 2], "hand_on": "projections"}},
        **{"position": "rotary", "num_key_value_heads": 2, "num_hidden_layers": 3},
    },
    "lazy_bias": {"attention": {"type": "lazyformer", "hand_on": "projections"}, "position": "alibi"},
}


@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "`block_size` >= 1"),
        ({"block_sizes": (2, 2)}, "for 4 layers, but the tower has 3"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, attention={"type": "lazyformer", **fields})


def test_other_layers_between_are_refused():
    with pytest.raises(ValueError, match="'lazyformer' .* give all layers 'lazyformer'"):
        XFormerConfig(**GEOMETRY, attention="lazyformer", per_layer_config={1: {"attention": "dense"}})


def test_norms_without_use_are_refused():
    """A layer that reads the memory with the map of another one does not read its own input."""
    with pytest.raises(ValueError, match="residual 'pre_ln' would have a norm without use"):
        XFormerConfig(**GEOMETRY, cross_attention="lazyformer", residual="pre_ln", is_encoder_decoder=True)
    fields = {**GEOMETRY, "residual": "pre_ln", "is_encoder_decoder": True}
    XFormerConfig(**fields, cross_attention={"type": "lazyformer", "block_size": 1})
    XFormerConfig(**fields, attention="lazyformer")
