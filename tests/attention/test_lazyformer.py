"""LazyFormer: the shared map by its equation on every path, what it saves, its cache, and its limits."""

import pytest

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.attention.shared.score_chain import Link
from tests.attention.score_helpers import (
    GEOMETRY,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close

CHAIN = Link, ("lazyformer", False)

PATHS = {"literal": ("eager", "auto"), "weights": ("sdpa", "weights"), "projections": ("sdpa", "projections")}


def build(path="weights", count=5, causal=False, cross=False, config=None, **fields):
    more = {"is_encoder_decoder": True} if cross else {}
    spec = {"type": "lazyformer", "hand_on": PATHS[path][1], **fields}
    return build_layers(spec, count, causal, cross, **{"num_hidden_layers": count, **more, **(config or {})})


def test_which_layers_have_queries():
    for fields, expected in (
        ({}, [True, False, True, False, True]),
        ({"block_size": 1}, [True] * 5),
        ({"block_size": 9}, [True, False, False, False, False]),
        ({"block_sizes": (1, 3, 1)}, [True, True, False, False, True]),
    ):
        assert [layer.q_proj is not None for layer in build(**fields)] == expected, fields


def test_parameters_saved():
    def count(attention):
        return sum(p.numel() for p in XFormerModel(XFormerConfig(**GEOMETRY, attention=attention)).parameters())

    width = GEOMETRY["hidden_size"]
    assert count("dense") - count("lazyformer") == 2 * (width**2 + width)  # one of three layers is not the first
    assert count("dense") - count({"type": "lazyformer", "block_size": 3}) == 4 * (width**2 + width)


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
    kept = results[0].states[CHAIN].weights
    assert (kept == 0).any()
    value = split_heads(layers[1].v_proj(vectors(1, 6) + results[0].output), 4)
    close(results[1].output, layers[1].o_proj((kept @ value).transpose(1, 2).flatten(2)))


def test_norms_without_use_are_refused():
    """A layer that reads the memory with the map of another one does not read its own input."""
    with pytest.raises(ValueError, match="residual 'pre_ln' would have a norm without use"):
        XFormerConfig(**GEOMETRY, cross_attention="lazyformer", residual="pre_ln", is_encoder_decoder=True)
    fields = {**GEOMETRY, "residual": "pre_ln", "is_encoder_decoder": True}
    XFormerConfig(**fields, cross_attention={"type": "lazyformer", "block_size": 1})
    XFormerConfig(**fields, attention="lazyformer")
