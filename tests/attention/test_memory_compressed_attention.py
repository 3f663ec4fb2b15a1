"""Memory-compressed attention against its slots written out, what no token may see, a state, and a PyPI package."""

import pytest
import torch

from hf_xformers import XFMemoryCompressedAttentionConfig, XFMemoryCompressedAttentionForCausalLM
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    in_pieces,
    make_context,
    run_layers,
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


def test_size_of_the_state():
    """One slot for every three tokens, and two tokens; local layers keep their blocks."""
    for fields, lengths, expected in (
        ({}, (1, 6, 13, 19), [slots * 2 * WIDTH + 2 * WIDTH + 1 for slots in (1, 3, 5, 7)]),
        ({"layer_pattern": "L", "block_size": 3}, (5, 13, 19), [2 * WIDTH * 5] * 3),
    ):
        (layer,) = build_layers({**SPEC, **fields}, causal=True)
        found = []
        for length in lengths:
            _, cache = in_pieces([layer], vectors(1, length), None, (length,))
            found.append(sum(tensor.numel() for tensor in cache.layers[0].state.values()))
        assert found == expected


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
