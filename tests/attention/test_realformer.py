"""RealFormer against its equation, against the joined projections, and against dense attention."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.attention.realformer import RealFormerAttention
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    allowed_pairs,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close, tokens

PATHS = ("literal", "scores", "projections")


@pytest.fixture
def path(request, monkeypatch):
    """One of the three ways to compute the same."""
    if request.param == "projections":
        monkeypatch.setattr(
            RealFormerAttention, "_hands_on_scores", lambda self, context, *_: self.wants_weights(context)
        )
    return {"implementation": "eager" if request.param == "literal" else "sdpa"}


each_path = pytest.mark.parametrize("path", PATHS, indirect=True)


def by_hand(layers, states, allowed, memory=None, mean=False, bias=None):
    """Outputs of each layer: scores summed over layers as they are, masked in each layer on their own."""
    total, outputs = 0.0, []
    for number, layer in enumerate(layers):
        width, groups = layer.head_dim, layer.num_heads // layer.num_key_value_heads
        read = states if memory is None else memory
        with torch.no_grad():
            q = split_heads(layer.q_proj(states), width)
            k, v = (split_heads(part(read), width) for part in (layer.k_proj, layer.v_proj))
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            total = total + torch.einsum("bhid,bhjd->bhij", q, k) / width**0.5
            logits = total / (number + 1) if mean else total
            logits = logits if bias is None else logits + bias
            weights = softmax_by_rows(logits, allowed)
            mixed = torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)
            outputs.append(layer.o_proj(mixed))
        states = states + outputs[-1]
    return outputs


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"num_key_value_heads": 2}, {"head_dim": 6}], ids=["plain", "grouped", "width"]
)
@pytest.mark.parametrize("mean", [False, True])
def test_equation(path, causal, fields, mean):
    layers = build_layers({"type": "realformer", "mean": mean}, 3, causal, **fields)
    states = vectors(4, 6)
    for mask in (None, PADDING):
        found = run_layers(layers, states, make_context(6, causal, padding_mask=mask, **path))
        expected = by_hand(layers, states, allowed_pairs(6, causal, mask), mean=mean)
        for one, other in zip(found, expected, strict=True):
            close(one.output.detach(), other)


@each_path
def test_chain_of_cross_attention(path):
    layers = build_layers("realformer", 3, cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, True, memory_padding_mask=PADDING, **path)
    found = run_layers(layers, states, context, memory)
    expected = by_hand(layers, states, PADDING[:, None, None, :], memory)
    for one, other in zip(found, expected, strict=True):
        close(one.output.detach(), other)
    assert all(name.startswith("realformer_cross") for name in found[-1].streams)


@each_path
def test_position_bias_is_not_handed_on(path):
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    layers = build_layers("realformer", 3)
    states, context = vectors(2, 6), make_context(6, **path)
    context.shared["score_bias"] = position
    bias = position.block(context.query_index, context.key_index).detach()
    expected = by_hand(layers, states, allowed_pairs(6, False), bias=bias)
    for one, other in zip(run_layers(layers, states, context), expected, strict=True):
        close(one.output.detach(), other)


def test_joined_projections():
    """Layer l is one dense attention over [q^0 .. q^l] and [k^0 .. k^l] with the scale of a single head width."""
    layers = build_layers("realformer", 4)
    states = vectors(2, 9)
    results = run_layers(layers, states, make_context(9))
    queries, keys = [], []
    with torch.no_grad():
        for layer, result in zip(layers, results, strict=True):
            q, k, v = (split_heads(part(states), 4) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
            queries.append(q)
            keys.append(k)
            joined = torch.cat(queries, -1), torch.cat(keys, -1)
            mixed = torch.nn.functional.scaled_dot_product_attention(*joined, v, scale=4**-0.5)
            close(result.output, layer.o_proj(mixed.transpose(1, 2).flatten(2)))
            states = states + result.output


@each_path
def test_first_layer_is_dense(path):
    (layer,), (dense,) = build_layers("realformer"), build_layers("dense")
    dense.load_state_dict(layer.state_dict())
    states, context = vectors(4, 6), make_context(6, padding_mask=PADDING, **path)
    expected = run_layers([dense], states, make_context(6, padding_mask=PADDING))[0]
    close(run_layers([layer], states, context)[0].output, expected.output)


def test_silent_layers_repeat_the_first():
    """Layers without queries of their own attend as layer 0 does."""
    layers = build_layers("realformer", 3)
    with torch.no_grad():
        for layer in layers[1:]:
            layer.q_proj.weight.zero_()
            layer.q_proj.bias.zero_()
    results = run_layers(layers, vectors(2, 6), make_context(6, output_attentions=True))
    for result in results[1:]:
        close(result.weights, results[0].weights)


@each_path
def test_gradient_through_the_scores(path):
    """The last layer's scores alone lead back to the first layer's queries."""
    layers = build_layers("realformer", 3)
    states = vectors(1, 6)
    results = run_layers(layers, states, make_context(6, **path), residual=False)  # every layer reads the same states
    (slope,) = torch.autograd.grad(results[-1].output.sum(), layers[0].q_proj.weight)
    assert slope.abs().max() > 1e-6


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
        close(result.streams["realformer_scores"], total)
        states = states + result.output


def test_scores_are_summed_in_single_precision():
    layers = [layer.to(torch.bfloat16) for layer in build_layers("realformer", 3)]
    results = run_layers(layers, vectors(1, 6).to(torch.bfloat16), make_context(6))
    assert results[-1].streams["realformer_scores"].dtype == torch.float32
    assert results[-1].output.dtype == torch.bfloat16


def test_what_is_kept():
    """Short texts hand on scores, long ones projections, and then nothing of T x T is kept."""
    layers = build_layers("realformer", 3)  # 4 layers' worth of width 4: scores up to 16 tokens
    assert "realformer_scores" in run_layers(layers, vectors(1, 16), make_context(16))[0].streams
    assert "realformer_queries" in run_layers(layers, vectors(1, 17), make_context(17))[0].streams
    for length in (100, 200):
        largest = saved_sizes(lambda: run_layers(layers, vectors(1, length), make_context(length)))[0]
        assert largest <= length * 3 * 4 * HEADS
    # A single token with a long cache has few scores, and many projections.
    context = make_context(1, True, past=500)
    assert layers[0]._hands_on_scores(context, 1, 501) and not layers[0]._hands_on_scores(context, 501, 501)


def test_cache_by_hand():
    layers = build_layers("realformer", 3, True)
    states = vectors(2, 30)
    expected = by_hand(layers, states, allowed_pairs(30, True))[-1]
    for first in (1, 20, 29):
        cache = DynamicCache()
        start = run_layers(layers, states[:, :first], make_context(first, True), cache=cache)[-1].output
        end = run_layers(layers, states[:, first:], make_context(30 - first, True, past=first), cache=cache)[-1].output
        close(torch.cat([start, end], 1).detach(), expected)


def test_layers_that_do_not_fit():
    with pytest.raises(ValueError, match="'realformer' shares tensors between layers.* layer 0 has .* and layer 1"):
        XFormerConfig(**GEOMETRY, attention="realformer", per_layer_config={1: {"num_attention_heads": 2}})


def test_dense_layers_between():
    """A layer of another kind is passed by, and does not count in the mean."""
    layers = build_layers({"type": "realformer", "mean": True}, 3)
    layers[1] = build_layers("dense")[0]
    states = vectors(2, 6)
    results = run_layers(layers, states, make_context(6), residual=False)
    parts = [[split_heads(part(states), 4) for part in (layer.q_proj, layer.k_proj, layer.v_proj)] for layer in layers]
    total = sum(q @ k.transpose(2, 3) / 2 for q, k, _ in (parts[0], parts[2]))
    close(results[2].streams["realformer_scores"], total)
    mixed = torch.softmax(total / 2, -1) @ parts[2][2]
    close(results[2].output, layers[2].o_proj(mixed.transpose(1, 2).flatten(2)))
    config = XFormerConfig(**GEOMETRY, attention="realformer", per_layer_config={1: {"attention": "dense"}})
    output = XFormerForMaskedLM(config).eval()(input_ids=tokens(1, 6, high=50), output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(1, 4, 6, 6)] * 3


MIXES = {
    "realformer_mean": {"attention": {"type": "realformer", "mean": True}, "num_key_value_heads": 2},
    "realformer_bias": {"attention": "realformer", "position": {"type": "t5_relative_bias", "num_buckets": 8}},
    "realformer_rotary": {"attention": "realformer", "position": "rotary", "residual": "pre_ln"},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("path", ["scores", "projections"], indirect=True)
@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case, path):
    check_contract(case)


@pytest.mark.parametrize("path", ["projections"], indirect=True)
@pytest.mark.parametrize("case", mixes({"mean": {"attention": {"type": "realformer", "mean": True}}}), ids=str)
def test_compile(case, path):
    check_compile(case)


def test_dropout_acts_on_weights():
    (layer,) = build_layers("realformer", attention_probs_dropout_prob=0.5)
    states = vectors(1, 6)
    expected = run_layers([layer], states, make_context(6))[0].output.detach()
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([run_layers([layer.train()], states, make_context(6))[0].output for _ in range(300)])
    assert (draws[0] - draws[1]).abs().max() > 1e-3
    assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 300**0.5 + 1e-12).all()
