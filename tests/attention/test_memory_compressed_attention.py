"""Memory-compressed attention against its slots written out, what no token may see, a state, and a PyPI package."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFMemoryCompressedAttentionConfig, XFMemoryCompressedAttentionForCausalLM, XFormerConfig
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

D = WIDTH // HEADS
SPEC = {"type": "memory_compressed_attention", "layer_pattern": "M"}
SPECS = {
    "conv": SPEC,
    "mean": {**SPEC, "compress": "mean", "compression_factor": 2},
    "max_null": {**SPEC, "compress": "max", "compress_activation": "silu", "first_slot": "null", "bias": False},
    "every_token": {**SPEC, "compression_factor": 1},
}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def slots_by_hand(layer, text, causal):
    """One text [n, D]: m_0, and each block's slot with the number of tokens of it."""
    factor, found = layer.spec.compression_factor, [text[0] if layer.null is None else layer.null]
    sizes = [1]
    for start in range(0, len(text), factor):
        block = text[start : start + factor]
        if causal and len(block) < factor:
            continue
        if layer.spec.compress == "conv":
            slot = layer.compress_proj.weight[:, : block.numel()] @ block.flatten() + layer.compress_proj.bias
        else:
            slot = block.mean(0) if layer.spec.compress == "mean" else block.max(0).values
        found.append(slot / (1 + (-slot).exp()) if layer.spec.compress_activation == "silu" else slot)
        sizes.append(len(block))
    return torch.stack(found), sizes


@torch.no_grad()
def by_hand(layer, states, mask=None, memory=None, causal=False):
    """One text, one head and one token at a time, on real tokens alone -> outputs, and weights of tokens."""
    read, factor = states if memory is None else memory, layer.spec.compression_factor
    q = split_heads(layer.q_proj(states), D)
    outputs, weights = torch.zeros_like(q), torch.zeros(*q.shape[:3], read.shape[1], dtype=q.dtype)
    for b in range(states.shape[0]):
        places = (torch.ones(read.shape[1]) if mask is None else mask[b]).nonzero()[:, 0].tolist()
        if not places:
            continue
        slots, sizes = slots_by_hand(layer, read[b, places], causal)
        k, v = (split_heads(part(slots)[None], D)[0] for part in (layer.k_proj, layer.v_proj))
        for h in range(HEADS):
            group = h * k.shape[0] // HEADS
            for i in places if memory is None else range(states.shape[1]):
                seen = [s for s in range(len(slots)) if not causal or s * factor <= places.index(i)]
                shares = torch.softmax(k[group, seen] @ q[b, h, i] / D**0.5, 0)
                outputs[b, h, i] = shares @ v[group, seen]
                for s, share in zip(seen, shares):
                    tokens = places[(s - 1) * factor : s * factor] if s else places[:1] * (layer.null is None)
                    for token in tokens:
                        weights[b, h, i, token] += share / sizes[s]
    return layer.o_proj(outputs.transpose(1, 2).flatten(2)), weights


@each_path
@each_spec
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_equation(implementation, spec, causal):
    for fields in ({}, {"num_key_value_heads": 2}):
        (layer,) = build_layers(spec, causal=causal, **fields)
        for length, mask in ((6, None), (6, PADDING), (7, None), (2, None), (1, None)):
            states = vectors(4, length)
            real = torch.ones(4, length).bool() if mask is None else mask
            context = make_context(length, causal, padding_mask=mask, implementation=implementation)
            (result,) = run_layers([layer], states, context)
            output, weights = by_hand(layer, states, mask, causal=causal)
            close(result.output[real].detach(), output[real])
            close(result.output[3].detach(), output[3])  # padding alone where there is padding
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows)


@each_path
@each_spec
def test_cross_attention(implementation, spec):
    (layer,) = build_layers(spec, cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        context = make_context(3, True, memory_padding_mask=mask, implementation=implementation)
        expected = by_hand(layer, states, mask, memory)[0]
        close(run_layers([layer], states, context, memory)[0].output.detach(), expected)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)


def test_first_tokens_read_the_first_slot_alone():
    (layer,) = build_layers(SPEC, causal=True)
    states = vectors(2, 7)
    with torch.no_grad():
        output = run_layers([layer], states, make_context(7, True))[0].output
        first = layer.o_proj(layer.v_proj(states[:, :1])).expand(-1, 3, -1)
    close(output[:, :3], first)
    assert (output[:, 3] - first[:, 0]).abs().max() > 1e-3


def test_slots_of_one_token_are_attention_to_the_past():
    """r = 1 and an identity convolution: {x_0} + {x_0 .. x_{i-1}}, the first token counted twice."""
    (layer,) = build_layers(SPECS["every_token"], causal=True)
    states = vectors(2, 6)
    with torch.no_grad():
        layer.compress_proj.weight.copy_(torch.eye(WIDTH))
        layer.compress_proj.bias.zero_()
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        counts = torch.ones(6, 6).tril(-1).double()
        counts[:, 0] += 1
        weights = softmax_by_rows(q @ k.mT / D**0.5, counts)
        expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6, True))[0].output, expected)


@pytest.mark.parametrize("training", [False, True])
@each_spec
def test_no_future(spec, training):
    (layer,) = build_layers(spec, causal=True, attention_probs_dropout_prob=0.5)
    check_no_future(layer, vectors(2, 11), training)


@each_spec
def test_cache(spec):
    (layer,) = build_layers(spec, causal=True, num_key_value_heads=2)
    states = vectors(2, 9)
    with torch.no_grad():
        expected = by_hand(layer, states, causal=True)[0]
        for pieces in ((1,) * 9, (4, 1, 3, 1), (3, 3, 3), (9,)):
            close(in_pieces(layer, states, pieces)[0], expected)
        mask = torch.ones(2, 9).bool()
        mask[0, :4] = False  # its blocks become complete at other times, and it begins after the first call
        alone, _ = in_pieces(layer, states[:1, 4:], (2, 1, 1, 1))
        for pieces in ((2, 3, 1, 1, 1, 1), (7, 1, 1), (1,) * 9):
            found, _ = in_pieces(layer, states, pieces, mask)
            close(found[:1, 4:], alone)
            close(found[1:], expected[1:])


def test_size_of_the_state():
    """One slot for every three tokens, and two tokens; local layers keep their blocks."""
    (layer,) = build_layers(SPEC, causal=True)
    states = vectors(1, 19)
    slots = [(size - 2 * WIDTH - 1) / (2 * WIDTH) for size in state_sizes(layer, states, (1, 6, 13, 19))]
    assert slots == [1, 3, 5, 7]
    (layer,) = build_layers({**SPEC, "layer_pattern": "L", "block_size": 3}, causal=True)
    assert state_sizes(layer, states, (5, 13, 19)) == [2 * WIDTH * 5] * 3


@each_path
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_local_layers(implementation, causal):
    """Dense attention among blocks of 3 that begin at the first real token."""
    (layer,) = build_layers({**SPEC, "layer_pattern": "L", "block_size": 2}, causal=causal)
    mask = torch.ones(2, 9).bool()
    mask[0, :3] = False
    states, place = vectors(2, 9), torch.stack([torch.arange(9) - 3, torch.arange(9)])
    block = place.div(2, rounding_mode="floor")
    apart = block[:, :, None] - block[:, None]
    seen = (apart >= (0 if causal else -1)) & (apart <= 1) & mask[:, None] & mask[:, :, None]
    if causal:
        seen &= place[:, :, None] >= place[:, None]
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = softmax_by_rows(q @ k.mT / D**0.5, seen[:, None])
        expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
        context = make_context(9, causal, padding_mask=mask, implementation=implementation)
        close(run_layers([layer], states, context)[0].output[mask], expected[mask])
        if causal:
            for pieces in ((1,) * 9, (4, 1, 3, 1)):
                close(in_pieces(layer, states, pieces, mask)[0][mask], expected[mask])


def test_package():
    """memory-compressed-attention compresses keys and values behind their projections, head by head, and divides
    scores by the root of the whole width: the same where both projections are one matrix P, which the convolution can
    be moved across. Its causal form lets the last token of a block see the block."""
    package = pytest.importorskip("memory_compressed_attention")
    torch.manual_seed(0)
    theirs = package.MemoryCompressedAttention(WIDTH, heads=HEADS, compression_factor=3).double().eval()
    (ours,) = build_layers({**SPEC, "first_slot": "null", "scale": WIDTH**-0.5})
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
        query, key, _ = theirs.to_qkv.weight.chunk(3)
        theirs.to_qkv.weight.copy_(torch.cat([query, key, key]))
        theirs.null_v.copy_(theirs.null_k)
        conv, inverse = theirs.compress_fn.conv, torch.linalg.inv(key)
        whole = torch.stack([torch.block_diag(*conv.weight[..., t].split(D)) for t in range(3)])  # [3, D, D]
        ours.compress_proj.weight.copy_(torch.cat([inverse @ each @ key for each in whole], dim=1))
        ours.compress_proj.bias.copy_(inverse @ conv.bias)
        ours.null.copy_(inverse @ theirs.null_k[0, 0])
        for own, weight in ((ours.q_proj, query), (ours.k_proj, key), (ours.v_proj, key)):
            own.weight.copy_(weight)
            own.bias.zero_()
        ours.o_proj.load_state_dict(theirs.to_out.state_dict())
        states = vectors(2, 9)
        close(run_layers([ours], states, make_context(9))[0].output, theirs(states), 1e-8)


def test_kinds_of_layers():
    def kinds(model):
        return "".join("L" if "Local" in type(layer.attention).__name__ else "M" for layer in model.model.trunk.layers)

    for fields, expected in (({}, "LMLML"), ({"attention": {**SPEC, "layer_pattern": "MML"}}, "MMLMM")):
        config = XFMemoryCompressedAttentionConfig(**{**GEOMETRY, "num_hidden_layers": 5, **fields})
        assert kinds(XFMemoryCompressedAttentionForCausalLM(config)) == expected


def test_what_is_kept():
    """Nothing of the size of all pairs; each of the r phases has its own copy of the slots."""
    for causal in (False, True):
        (layer,) = build_layers({**SPEC, "compression_factor": 32}, causal=causal)
        for length in (64, 256):
            sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, causal)))
            assert sizes[0] <= max(length, 32 * WIDTH) * WIDTH, sizes[:3]


def test_refusals():
    for fields, message in (
        ({"compression_factor": 0}, "`compression_factor` >= 1, got 0"),
        ({"block_size": 0}, "`block_size` >= 1"),
        ({"local_lookback": -1}, "`local_lookback` >= 0"),
        ({"layer_pattern": "LX"}, "letters L .local. and M .compressed., such as 'LM', got 'LX'"),
        ({"layer_pattern": ""}, "letters L"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={**SPEC, **fields})
    with pytest.raises(ValueError, match="rotates queries and keys"):
        XFormerConfig(**GEOMETRY, attention=SPEC, position="rotary")


MIXES = {
    "both": {"attention": {**SPEC, "layer_pattern": "LM", "block_size": 3}, "num_key_value_heads": 2},
    "mean": {"attention": {**SPECS["mean"], "query_key_norm": "head"}, "residual": "pre_ln"},
}
CROSS = {"cross": {"attention": SPEC, "cross_attention": SPECS["max_null"]}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", [*mixes(MIXES), *mixes(CROSS, ("seq2seq",))], ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", mixes({"compressed": {"attention": SPEC, "num_hidden_layers": 1}}), ids=str)
def test_compile(case):
    check_compile(case)
