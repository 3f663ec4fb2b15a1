"""Memory-compressed attention against the package on PyPI."""

import pytest
import torch

from tests.attention.score_helpers import (
    HEADS,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPEC = {"type": "memory_compressed_attention", "layer_pattern": "M"}


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
