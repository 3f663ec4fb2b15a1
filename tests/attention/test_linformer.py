"""Linformer against its equation, its exact limit, fairseq's order of operations, and the four kinds of sharing."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
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
from tests.helpers import close, gradients, tokens

D, N, K = WIDTH // HEADS, 9, 3
MODES = ("none", "headwise", "key_value", "layerwise")
each_mode = pytest.mark.parametrize("sharing", MODES)
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def spec(sharing="headwise", **fields):
    return {"type": "linformer", "sharing": sharing, "projected_length": K, "max_length": N, **fields}


def matrices(layer, owner):
    """E and F of each head."""
    first = owner.key_projection
    second = first if layer.value_projection is None else layer.value_projection
    expanded = [m if m.ndim == 3 else m.expand(HEADS, -1, -1) for m in (first, second)]
    return [m.repeat_interleave(HEADS // m.shape[0], 0) for m in expanded]


@torch.no_grad()
def by_hand(layer, states, mask=None, memory=None, owner=None):
    """One text and one head at a time, on its real tokens alone -> outputs and weights of tokens."""
    first, second = matrices(layer, owner or layer)
    read = states if memory is None else memory
    q = split_heads(layer.q_proj(states), D)
    outputs, weights = torch.zeros_like(q), torch.zeros(*q.shape[:3], read.shape[1], dtype=q.dtype)
    for b in range(states.shape[0]):
        real = torch.ones(read.shape[1]).bool() if mask is None else mask[b]
        count = int(real.sum())
        if not count:
            continue
        for h in range(HEADS):
            group = h * layer.num_key_value_heads // HEADS
            k = split_heads(layer.k_proj(read[b : b + 1, real]), D)[0, group]
            v = split_heads(layer.v_proj(read[b : b + 1, real]), D)[0, group]
            short = torch.softmax(q[b, h] @ (first[h, :, :count] @ k).t() / D**0.5, -1)
            weights[b, h][:, real] = short @ second[h, :, :count]
            outputs[b, h] = short @ (second[h, :, :count] @ v)
    return layer.o_proj(outputs.transpose(1, 2).flatten(2)), weights


@each_path
@each_mode
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}], ids=["heads", "groups"])
def test_equation(implementation, sharing, fields):
    layers, states = build_layers(spec(sharing), 2, **fields), vectors(4, 6)
    for mask in (None, PADDING):
        results = run_layers(layers, states, make_context(6, padding_mask=mask, implementation=implementation))
        given = states
        for layer, result in zip(layers, results):
            owner = layers[0] if sharing == "layerwise" else layer
            output, weights = by_hand(layer, given, mask, owner=owner)
            close(result.output.detach(), output)
            if implementation == "eager":
                close(result.weights.detach(), weights)
            given = given + output


@each_path
@pytest.mark.parametrize("sharing", MODES[:3])
def test_cross_attention(implementation, sharing):
    (layer,) = build_layers(spec(sharing), cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        context = make_context(3, True, memory_padding_mask=mask, implementation=implementation)
        expected = by_hand(layer, states, mask, memory)[0]
        close(run_layers([layer], states, context, memory)[0].output.detach(), expected)
    if implementation == "sdpa":
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)
        assert cache.cross_attention_cache.layers[0].keys.shape[2] == K


@torch.no_grad()
def blocks_by_hand(layer, states, mask=None, memory=None, owner=None):
    """One text, one head and one block of n / k tokens at a time -> outputs and weights of tokens."""
    owner, read = owner or layer, states if memory is None else memory
    size, how = -(-N // K), layer.spec.projection
    kernels = [None, None] if how != "conv" else [owner.key_projection, layer.value_projection]
    kernels = [kernels[0] if kernel is None else kernel for kernel in kernels]
    q = split_heads(layer.q_proj(states), D)
    outputs, weights = torch.zeros_like(q), torch.zeros(*q.shape[:3], read.shape[1], dtype=q.dtype)
    for b in range(states.shape[0]):
        places = (torch.ones(read.shape[1]) if mask is None else mask[b]).nonzero()[:, 0]
        blocks = list(places.split(size)) if len(places) else []
        for h in range(HEADS if blocks else 0):
            group, rows = h * layer.num_key_value_heads // HEADS, []
            for projection, kernel in zip((layer.k_proj, layer.v_proj), kernels):
                each = split_heads(projection(read[b : b + 1]), D)[0, group]
                if how == "conv":
                    own = kernel[group] if kernel.ndim == 3 else kernel
                    taps = own.view(D, size, D)  # what channel c takes of channel e of the t-th token
                    made = [sum(taps[:, t] @ each[place] for t, place in enumerate(block)) for block in blocks]
                else:
                    made = [each[block].mean(0) if how == "mean" else each[block].amax(0) for block in blocks]
                rows.append(torch.stack(made))
            shares = torch.softmax(q[b, h] @ rows[0].t() / D**0.5, -1)
            outputs[b, h] = shares @ rows[1]
            for number, block in enumerate(blocks):
                weights[b, h][:, block] = shares[:, number : number + 1] / len(block)
    return layer.o_proj(outputs.transpose(1, 2).flatten(2)), weights


POOLED = [{"projection": "mean"}, {"projection": "max"}, *({"projection": "conv", "sharing": mode} for mode in MODES)]
each_pooled = pytest.mark.parametrize("fields", POOLED, ids=lambda fields: "-".join(fields.values()))


@each_path
@each_pooled
@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 2}], ids=["heads", "groups"])
def test_blocks(implementation, fields, heads):
    layers = build_layers(spec(**fields), 2, **heads)
    for length, mask in ((6, None), (6, PADDING), (7, None), (1, None)):
        given = vectors(4, length)
        real = torch.ones(4, length).bool() if mask is None else mask
        results = run_layers(layers, given, make_context(length, padding_mask=mask, implementation=implementation))
        for layer, result in zip(layers, results):
            output, weights = blocks_by_hand(
                layer, given, mask, owner=layers[0] if "layerwise" in str(fields) else None
            )
            close(result.output[real].detach(), output[real])
            close(result.output[3].detach(), output[3])
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows)
            given = given + result.output.detach()


@each_path
@pytest.mark.parametrize("fields", POOLED[:4], ids=lambda fields: "-".join(fields.values()))
def test_blocks_of_a_memory(implementation, fields):
    (layer,) = build_layers(spec(**fields), cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        context = make_context(3, True, memory_padding_mask=mask, implementation=implementation)
        expected = blocks_by_hand(layer, states, mask, memory)[0]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)


@each_mode
def test_identity_projections_are_exact_attention(sharing):
    """k = n tokens and E = F = I; with padding the softmax keeps the zero rows, so only full texts are equal."""
    (layer,) = build_layers(spec(sharing, projected_length=6, max_length=6))
    states = vectors(2, 6)
    with torch.no_grad():
        for projection in (layer.key_projection, layer.value_projection):
            if projection is not None:
                projection.copy_(torch.eye(6).expand_as(projection))
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6))[0].output, expected, 1e-12)


def test_random_projections_approach_linear_functions():
    """E = F with rows N(0, 1 / k): E^T E tends to I, so (q K^T) E^T E V tends to q K^T V as 1 / sqrt(k)."""
    states, errors = vectors(1, N), []
    for rows in (8, 128):
        (layer,) = build_layers(spec("key_value", projected_length=rows, max_length=200))
        with torch.no_grad():
            layer.key_projection.copy_(torch.randn(rows, 200) / rows**0.5)
            key, value = layer._short(states, layer.key_projection, layer.key_projection, make_context(N), None, 0)
            k, v = (split_heads(part(states), D) for part in (layer.k_proj, layer.v_proj))
            exact = k.mT @ v
            errors.append(((key.mT @ value - exact).norm() / exact.norm()).item())
    assert errors[1] < 0.5 * errors[0] and errors[1] < 0.5, errors


def test_parameters():
    """Numbers of parameters of the four kinds of sharing in a model of three layers."""
    counts = {}
    for sharing in MODES:
        model = XFormerForMaskedLM(XFormerConfig(**GEOMETRY, attention=spec(sharing)))
        named = [(name, p) for name, p in model.named_parameters() if name.endswith("_projection")]
        counts[sharing] = sum(parameter.numel() for _, parameter in named)
    each = K * N
    assert counts == {"none": 2 * HEADS * each * 3, "headwise": 2 * each * 3, "key_value": each * 3, "layerwise": each}


def test_layerwise_gradient_is_the_sum_over_layers():
    """One matrix in three layers gets what three equal matrices get together."""
    ids, found = tokens(2, 7, high=50), {}
    for sharing in ("layerwise", "key_value"):
        torch.manual_seed(0)
        model = XFormerForMaskedLM(XFormerConfig(**GEOMETRY, attention=spec(sharing))).double().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.endswith("key_projection"):
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            shared = torch.randn(K, N, generator=torch.Generator().manual_seed(2))
            for layer in model.model.trunk.layers:
                if layer.attention.key_projection is not None:
                    layer.attention.key_projection.copy_(shared)
        found[sharing] = gradients(model, model(input_ids=ids).logits)
    names = [f"model.trunk.layers.{index}.attention.key_projection" for index in range(3)]
    close(found["layerwise"][names[0]], sum(found["key_value"][name] for name in names))


def test_positions_matter():
    """Swapping two tokens changes what a third one reads: the projection knows places."""
    (layer,) = build_layers(spec())
    states = vectors(1, 6)
    swapped = states[:, [1, 0, 2, 3, 4, 5]]
    with torch.no_grad():
        outputs = [run_layers([layer], x, make_context(6))[0].output[:, 5] for x in (states, swapped)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_padding_takes_no_columns():
    """A row of n real tokens fits, wherever its padding stands; one more does not."""
    (layer,) = build_layers(spec())
    states = vectors(1, N)
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(N))[0].output
        for where in (slice(0, N), slice(4, N + 4)):
            mask = torch.zeros(1, N + 4).bool()
            mask[:, where] = True
            padded = torch.full((1, N + 4, WIDTH), 7.0).double()
            padded[:, where] = states
            for implementation in ("eager", "sdpa"):
                context = make_context(N + 4, padding_mask=mask, implementation=implementation)
                close(run_layers([layer], padded, context)[0].output[:, where], expected)
        with pytest.raises(ValueError, match="10 tokens, but this linformer projects 9"):
            run_layers([layer], vectors(1, N + 1), make_context(N + 1))


def test_what_is_kept():
    (layer,) = build_layers(spec(max_length=256, projected_length=8))
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))
        assert sizes[0] <= length * max(WIDTH, 8 * HEADS), sizes[:3]


def test_refusals():
    for fields, message in (
        ({"projected_length": 0}, "`projected_length` >= 1, got 0"),
        ({"projected_length": 10}, "more, not fewer"),
        ({"sharing": "headless"}, "sharing"),
        ({"sharing": "key_value", "projection": "mean"}, "has no parameters that `sharing` 'key_value' could"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            XFormerConfig(**GEOMETRY, attention=spec(**fields))
    with pytest.raises(ValueError, match="no causal form"):
        XFormerConfig(**GEOMETRY, attention="linformer", is_decoder=True)
    with pytest.raises(ValueError, match="no layers below"):
        build_layers(spec("layerwise"), cross=True, is_encoder_decoder=True)
    second = build_layers(spec("layerwise"), 2)[1]
    with pytest.raises(ValueError, match="was handed no projection"):
        run_layers([second], vectors(1, 3), make_context(3))


SHARED = {name: {"attention": {**spec(name, max_length=24)}} for name in MODES}
BLOCKS = {
    "linformer_max": {"attention": spec(max_length=24, projection="max")},
    "linformer_conv": {"attention": spec("layerwise", max_length=24, projection="conv")},
}
CROSS = {
    "linformer_cross": {
        "attention": spec(max_length=24),
        "cross_attention": spec(max_length=24, bias=False),
        "decoder": {"attention": "dense"},
    }
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", [*mixes({**SHARED, **BLOCKS}, ("encoder",)), *mixes(CROSS, ("seq2seq",))], ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    "case", mixes({"linformer": {**SHARED["layerwise"], "num_hidden_layers": 2}}, ("encoder",)), ids=str
)
def test_compile(case):
    check_compile(case)
