"""Luna against its equations, loops over tokens, other shapes of the same sums, and the path of its memory."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFLunaConfig, XFLunaForCausalLM, XFLunaForMaskedLM, XFLunaForSeq2SeqLM, XFormerConfig
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes
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
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

D, L = WIDTH // HEADS, 4
SPEC = {"type": "luna", "projected_length": L, "chunk_size": 4}
SPECS = {
    "tied": SPEC,
    "untied": {**SPEC, "tie_kv": False},
    "two_heads_pack": {**SPEC, "pack_heads": 2},
    "static": {**SPEC, "dynamic_projection": False, "bias": False},
}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def attend(query, key, value, heads, allowed):
    """softmax(q k^T / sqrt(d)) v by heads, [B, T, heads * d]."""
    d = query.shape[-1] // heads
    q, k, v = (split_heads(x, d) for x in (query, key, value))
    weights = softmax_by_rows(q @ k.mT / d**0.5, allowed[:, None, None, :])
    return (weights @ v).transpose(1, 2).flatten(2), weights


@torch.no_grad()
def by_hand(layer, states, handed, mask=None, memory=None):
    """Pack and unpack -> output, weights and P'."""
    read = states if memory is None else memory
    mask = torch.ones(read.shape[:2]).bool() if mask is None else mask
    handed = handed.expand(read.shape[0], -1, -1)
    value_proj = layer.pack_v_proj or layer.pack_k_proj
    heads = layer.spec.pack_heads or HEADS
    packed, packing = attend(layer.pack_q_proj(handed), layer.pack_k_proj(read), value_proj(read), heads, mask)
    slots = mask.any(-1, keepdim=True).expand(-1, L)
    if layer.spec.dynamic_projection and memory is None:
        slots = torch.arange(L) < mask.sum(-1, keepdim=True)
    value_proj = layer.v_proj or layer.k_proj
    found, reading = attend(layer.q_proj(states), layer.k_proj(packed), value_proj(packed), HEADS, slots)
    packing = packing if heads == HEADS else packing.mean(1, keepdim=True)
    after = None if layer.memory_norm is None else layer.memory_norm(handed + packed)
    return layer.o_proj(found), reading @ packing, after


@each_path
@each_spec
def test_pack_and_unpack(implementation, spec):
    """Three layers, the memory on its way through them; texts shorter than the memory among them."""
    layers = build_layers(spec, 3)
    assert [layer.memory is None for layer in layers] == [False, True, True]
    assert [layer.memory_norm is None for layer in layers] == [False, False, True]
    for length, mask in ((6, None), (6, PADDING), (3, None), (1, None)):
        given, handed = vectors(4, length), layers[0].memory[None]
        results = run_layers(layers, given, make_context(length, padding_mask=mask, implementation=implementation))
        for layer, result in zip(layers, results):
            output, weights, handed = by_hand(layer, given, handed, mask)
            close(result.output.detach(), output)
            if implementation == "eager":
                close(result.weights.detach(), weights)
            given = given + output
        if implementation == "eager" and mask is None:
            close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


@torch.no_grad()
def decode_by_hand(layer, states, handed, mask=None):
    """The two running sums, one text, one head and one token at a time."""
    q, k = split_heads(layer.q_proj(states), D), split_heads(layer.k_proj(states), D)
    v = k if layer.v_proj is None else split_heads(layer.v_proj(states), D)
    p = split_heads(layer.pack_q_proj(handed.expand(states.shape[0], -1, -1)), D)
    outputs = torch.zeros_like(v)
    for b in range(states.shape[0]):
        for h in range(HEADS):
            count, keys, values = 0, torch.zeros(D, L).double(), torch.zeros(L, D).double()
            for t in range(states.shape[1]):
                x = p[b, h] @ k[b, h, t] / D**0.5
                opened = torch.where(x > 0, x + 1, torch.exp(x))
                if mask is None or mask[b, t]:
                    count += 1
                    keys, values = keys + torch.outer(k[b, h, t], opened), values + torch.outer(opened, v[b, h, t])
                reading = torch.softmax(q[b, h, t] @ keys / D**0.5 / max(count, 1), -1)
                outputs[b, h, t] = reading @ values / max(count, 1)
    return layer.o_proj(outputs.transpose(1, 2).flatten(2))


@each_path
@each_spec
def test_causal_form(implementation, spec):
    layers, states = build_layers(spec, 2, causal=True), vectors(4, 6)
    handed = layers[0].memory[None]
    for mask in (None, PADDING):
        context = make_context(6, True, padding_mask=mask, implementation=implementation)
        first, second = run_layers(layers, states, context)
        expected = decode_by_hand(layers[0], states, handed, mask)
        close(first.output.detach(), expected)
        close(second.output.detach(), decode_by_hand(layers[1], states + expected, handed, mask))


def test_weights_of_a_decoder():
    """What a decoder reads of each value: the slopes of its output."""
    (layer,) = build_layers({**SPEC, "tie_kv": False, "bias": False}, causal=True)
    states = vectors(1, 5)
    with torch.no_grad():
        (result,) = run_layers([layer], states, make_context(5, True, implementation="eager"))
        value = split_heads(layer.v_proj(states), D)
        close(result.output, layer.o_proj((result.weights @ value).transpose(1, 2).flatten(2)))
        assert (result.weights >= 0).all() and (result.weights.triu(1) == 0).all()


@each_path
@each_spec
def test_cross_attention(implementation, spec):
    """Packs the memory, changes P, and reads; with a cache the text is packed once."""
    config = {"cross": True, "is_encoder_decoder": True}
    layers = build_layers(spec, 2, **config)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, True, memory_padding_mask=PADDING, implementation=implementation)
    output, _, after = by_hand(layers[0], states, layers[0].memory[None], PADDING, memory)
    expected = [output, by_hand(layers[1], states + output, after, PADDING, memory)[0]]
    for found, wanted in zip(run_layers(layers, states, context, memory), expected):
        close(found.output.detach(), wanted)
    if implementation == "sdpa":
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            for found, wanted in zip(run_layers(layers, states, context, read, cache), expected):
                close(found.output.detach(), wanted)


@each_spec
def test_cache(spec):
    (layer,) = build_layers(spec, causal=True)
    states = vectors(2, 9)
    with torch.no_grad():
        expected = decode_by_hand(layer, states, layer.memory[None])
        for pieces in ((1,) * 9, (4, 1, 3, 1), (9,)):
            close(in_pieces(layer, states, pieces)[0], expected)
        mask = torch.ones(2, 9).bool()
        mask[0, :3] = False
        alone, _ = in_pieces(layer, states[:1, 3:], (4, 1, 1))
        found, _ = in_pieces(layer, states, (7, 1, 1), mask)
        close(found[:1, 3:], alone)
        each = HEADS * D * L * (1 if layer.v_proj is None else 2) + 1
        assert state_sizes(layer, states, (1, 5, 9)) == [2 * each] * 3


@pytest.mark.parametrize("training", [False, True])
def test_no_future(training):
    (layer,) = build_layers(SPEC, causal=True, attention_probs_dropout_prob=0.5)
    check_no_future(layer, vectors(2, 11), training)


def test_order_of_tokens():
    """Without positions the memory does not know the order of tokens, and outputs follow it."""
    layers, states, order = build_layers(SPEC, 2), vectors(2, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    with torch.no_grad():
        results = run_layers(layers, states, make_context(7))
        moved = run_layers(layers, states[:, order], make_context(7))
    for one, other in zip(results, moved):
        close(other.output, one.output[:, order])
    close(results[0].streams["luna_memory"], moved[0].streams["luna_memory"])


def test_a_memory_of_one_vector():
    """Every token of a text reads the same."""
    (layer,) = build_layers({**SPEC, "projected_length": 1})
    with torch.no_grad():
        output = run_layers([layer], vectors(2, 6), make_context(6))[0].output
    close(output, output[:, :1].expand_as(output))


def test_rank():
    """The weights of a head have at most the rank of the memory."""
    (layer,) = build_layers({**SPEC, "projected_length": 2})
    with torch.no_grad():
        weights = run_layers([layer], vectors(2, 9), make_context(9, implementation="eager"))[0].weights
    assert int(torch.linalg.matrix_rank(weights, rtol=1e-10).max()) == 2


def test_where_the_memory_goes():
    """An encoder packs in every layer; a decoder's memory is one parameter that no text changes; in an encoder-decoder
    the decoder's memory is changed by cross-attention, hence by the encoder's text."""
    fields = {**GEOMETRY, "attention": SPEC, "cross_attention": SPEC}

    def names(model):
        return [name for name, _ in model.named_parameters() if name.endswith((".memory", "memory_norm.weight"))]

    encoder = XFLunaForMaskedLM(XFLunaConfig(**fields))
    layer = "model.trunk.layers.{}.attention."
    assert names(encoder) == [layer.format(0) + "memory", *(layer.format(i) + "memory_norm.weight" for i in (0, 1))]
    assert names(XFLunaForCausalLM(XFLunaConfig(**fields))) == [layer.format(0) + "memory"]
    both = names(XFLunaForSeq2SeqLM(XFLunaConfig(**fields, is_encoder_decoder=True)))
    layer = "model.decoder.layers.{}."
    assert [name for name in both if name.startswith("model.decoder")] == [
        layer.format(0) + "attention.memory",
        *(layer.format(i) + "cross_attention.memory_norm.weight" for i in (0, 1)),
    ]


def test_what_is_kept():
    for causal in (False, True):
        (layer,) = build_layers({"type": "luna", "projected_length": 8}, causal=causal)
        for length in (64, 256):
            sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, causal)))
            assert sizes[0] <= length * max(WIDTH, HEADS * 8), sizes[:3]


def test_refusals():
    for fields, message in (
        ({"projected_length": 0}, "`projected_length` >= 1, got 0"),
        ({"pack_heads": 3}, "divide `hidden_size` 16, got 3"),
        ({"chunk_size": 0}, "`chunk_size` >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={**SPEC, **fields})
    with pytest.raises(ValueError, match="does not group heads"):
        XFormerConfig(**GEOMETRY, attention="luna", num_key_value_heads=2)
    with pytest.raises(ValueError, match="leave `head_dim` unset"):
        XFormerConfig(**GEOMETRY, attention="luna", head_dim=8)
    second = build_layers(SPEC, 2)[1]
    with pytest.raises(ValueError, match="was handed no memory"):
        run_layers([second], vectors(1, 3), make_context(3))


def test_dropout_of_an_encoder():
    (layer,) = build_layers(SPEC, attention_probs_dropout_prob=0.3)
    states = vectors(1, 6)
    with torch.no_grad():
        draws = [run_layers([layer.train()], states, make_context(6))[0].output for _ in range(2)]
    assert (draws[0] - draws[1]).abs().max() > 1e-3


def test_dropout_of_the_memory():
    """It falls on what is added to the memory, not on what tokens read; in evaluation on nothing."""
    handed = {}
    for rate in (None, 0.0, 0.5):
        spec = {**SPEC, "memory_dropout": rate}
        layer = build_layers(spec, 2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.5)[0].train()
        results = [run_layers([layer], vectors(1, 6), make_context(6))[0] for _ in range(2)]
        close(results[0].output, results[1].output)
        first, second = (result.streams["luna_memory"] for result in results)
        assert torch.equal(first, second) == (rate == 0.0)
        layer.eval()
        handed[rate] = run_layers([layer], vectors(1, 6), make_context(6))[0].streams["luna_memory"]
    close(handed[None], handed[0.5])
    with pytest.raises(ValueError, match="`memory_dropout` in"):
        XFormerConfig(**GEOMETRY, attention={**SPEC, "memory_dropout": 1.0})


MIXES = {
    "luna_untied": {"attention": SPECS["untied"], "residual": "pre_ln"},
    "luna_static": {"attention": SPECS["static"], "cross_attention": {**SPEC, "pack_heads": 2}},
}
DENSE_SELF = {"luna_cross": {"decoder": {"attention": "dense"}, "attention": SPEC, "cross_attention": SPEC}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "case",
    [
        *mixes({"luna_untied": MIXES["luna_untied"]}),
        *mixes({"luna_static": MIXES["luna_static"], **DENSE_SELF}, ("seq2seq",)),
    ],
    ids=str,
)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", mixes({"luna": {"attention": SPEC, "num_hidden_layers": 1}}, ("decoder",)), ids=str)
def test_compile(case):
    check_compile(case)
