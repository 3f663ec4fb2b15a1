"""RealFormer: what layers hand on, what that keeps, and dense layers between."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.attention.shared.score_chain import Link
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close, tokens

CHAIN = Link, ("realformer", False)


@pytest.mark.parametrize("mean", [False, True])
def test_handed_on_is_the_unmasked_sum(mean):
    layers = build_layers({"type": "realformer", "mean": mean}, 3, True)
    states = vectors(4, 6)
    context = make_context(6, True, padding_mask=PADDING, output_attentions=True)
    results = run_layers(layers, states, context)
    total = 0.0
    for layer, result in zip(layers, results, strict=True):
        with torch.no_grad():
            q, k = (split_heads(part(states), 4) for part in (layer.q_proj, layer.k_proj))
        total = total + q @ k.transpose(2, 3) / 2
        close(result.states[CHAIN].scores, total)
        states = states + result.output


def test_what_is_kept():
    """Short texts hand on scores, long ones projections, and then nothing of T x T is kept."""
    layers = build_layers("realformer", 3)  # 4 layers' worth of width 4: scores up to 16 tokens
    assert run_layers(layers, vectors(1, 16), make_context(16))[0].states[CHAIN].scores is not None
    assert run_layers(layers, vectors(1, 17), make_context(17))[0].states[CHAIN].queries is not None
    for length in (100, 200):
        largest = saved_sizes(lambda: run_layers(layers, vectors(1, length), make_context(length)))[0]
        assert largest <= length * 3 * 4 * HEADS
    # A single token with a long cache has few scores, and many projections.
    context = make_context(1, True, past=500)
    assert layers[0]._hands_on_scores(context, 1, 501) and not layers[0]._hands_on_scores(context, 501, 501)


def test_dense_layers_between():
    """A layer of another kind is passed by, and does not count in the mean."""
    layers = build_layers({"type": "realformer", "mean": True}, 3)
    layers[1] = build_layers("dense")[0]
    states = vectors(2, 6)
    results = run_layers(layers, states, make_context(6), residual=False)
    parts = [[split_heads(part(states), 4) for part in (layer.q_proj, layer.k_proj, layer.v_proj)] for layer in layers]
    total = sum(q @ k.transpose(2, 3) / 2 for q, k, _ in (parts[0], parts[2]))
    close(results[2].states[CHAIN].scores, total)
    mixed = torch.softmax(total / 2, -1) @ parts[2][2]
    close(results[2].output, layers[2].o_proj(mixed.transpose(1, 2).flatten(2)))
    config = XFormerConfig(**GEOMETRY, attention="realformer", per_layer_config={1: {"attention": "dense"}})
    output = XFormerForMaskedLM(config).eval()(input_ids=tokens(1, 6, high=50), output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(1, 4, 6, 6)] * 3
