"""Every mechanism where queries and keys are long: finite, and close to its literal path in float32, in every
precision.

Projections are signed permutations within each head and inputs numbers that bfloat16 holds, so that queries, keys and
values are the same in all precisions, |q| = |k| = 100, and only what a mechanism computes from them differs.
"""

import copy

import pytest
import torch
from torch import nn

from hf_xformers.core.components import SLOTS, names
from hf_xformers.core.hand_overs import HandOver
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers

LENGTH, LONG = 21, 100.0
SMALL = {  # sizes at which a text of 21 tokens has several chunks, clusters, landmarks
    "luna": {"projected_length": 4, "chunk_size": 4},
    "linformer": {"projected_length": 8},
    "nystromformer": {"num_landmarks": 4, "conv_kernel_size": 3},
    "csalr": {"num_landmarks": 4},
    "clustered_attention": {"num_clusters": 4},
    "improved_clustered_attention": {"num_clusters": 4, "topk": 4},
    "informer": {"sampling_factor": 1},
    "low_rank_band": {"low_rank": 4},
    "set_transformer": {"num_inducing": 4},
    "memory_compressed_attention": {"layer_pattern": "M"},
    "performer": {"num_features": 16, "chunk_size": 8},
    "linear_transformer": {"chunk_size": 8},
    "arccos_attention": {"num_features": 16, "chunk_size": 8},
    "rfa": {"num_features": 16, "chunk_size": 8},
    "dpfp": {"chunk_size": 8},
    "delta_net": {"chunk_size": 8},
    "reformer": {"num_buckets": 4, "chunk_length": 4},
    "routing_transformer": {"num_clusters": 3, "window_size": 5, "block_size": 4},
    "longformer": {"attention_window": 8},
    "bigbird": {"block_size": 4},
    "axial_transformer": {"columns": 5},
    "etc": {"local_radius": 4},
    "image_transformer": {"block_length": 4, "memory_length": 3},
    "sinkhorn_transformer": {"block_size": 4},
    "transient_global": {"window_size": 4, "block_size": 4},
    "gated_delta_net": {"chunk_size": 8},
    "retnet": {"chunk_size": 8},
}
NORMED = ("gated_delta_net", "retnet")  # what heads have read: small values would have large gradients
IN_STACKS = {
    "bp_transformer",
    "conditional",
    "feedback",
    "memory_vector",
}  # built by a stack or block of their own; tests/common/test_large_weights.py has them
ATTENTIONS = [name for name in names("attention") if name not in IN_STACKS]
TERMS = (
    "t5_relative_bias",
    "alibi",
    "deberta",
    "shaw_relative",
    "tupe",
    "learnable_sinusoidal_relative",
    "music_transformer",
    "gaussian_transformer",
)
# Of the norm of the output. In half precision some keys are made of others (unit vectors, projections, landmarks) and
# are rounded.
LIMITS = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.2}


def signed_permutations(layer, generator, values=2.0**-6):
    """Each linear map takes a channel to another one of its head, and `values` is the size of values."""
    width = WIDTH // HEADS
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        rows, columns = module.weight.shape
        heads = [torch.randperm(width, generator=generator) + width * head for head in range(-(-rows // width))]
        signs = torch.randint(0, 2, (rows,), generator=generator) * 2.0 - 1
        weight = torch.zeros(rows, columns)
        weight[torch.arange(rows), torch.cat(heads)[:rows] % columns] = signs
        module.weight.data.copy_(weight * (values if name.endswith("v_proj") else 1.0))
        if module.bias is not None:
            module.bias.data.zero_()


def long_inputs(seed):
    """[2, T, D], each head's part of length 100; some tokens are repeated, some are opposite to others."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, LENGTH, WIDTH, generator=generator)
    states[:, 5], states[:, 9], states[1, 12:] = -states[:, 4], states[:, 8], -states[1, 11]
    by_head = states.unflatten(-1, (HEADS, -1))
    return (by_head * (LONG / by_head.norm(dim=-1, keepdim=True))).flatten(2).bfloat16()


def run(layer, position, states, causal, implementation):
    """The output and all gradients, in float32."""
    layer.zero_grad()
    context = make_context(LENGTH, causal, implementation=implementation)
    if position is not None:
        position.share(context, states)
    states = states.clone().requires_grad_()
    output = run_layers([layer], states, context, residual=False)[-1].output
    output.float().sum().backward()
    found = [states.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return output.detach().float(), found


def check(attention, causal, position="none"):
    generator = torch.Generator().manual_seed(0)
    spec = {"type": attention, **SMALL.get(attention, {})}
    (layer,) = build_layers(spec, 1, causal, position=position)
    signed_permutations(layer, generator, 1.0 if attention in NORMED else 2.0**-6)
    table = None
    if position != "none":
        table = layer.config.position.build(layer.config)
        for parameter in table.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        table = None if table.score_bias() is None and table.shared_tables() is None else table
    for dtype, limit in LIMITS.items():
        layer, table = layer.to(dtype), None if table is None else table.to(dtype)
        wide, wide_table = copy.deepcopy(layer).float(), None if table is None else copy.deepcopy(table).float()
        states = long_inputs(1)
        expected, wide_gradients = run(wide, wide_table, states.float(), causal, "eager")
        assert expected.isfinite().all(), "the literal path in float32"
        for implementation in ("sdpa", "eager"):
            output, gradients = run(layer, table, states.to(dtype), causal, implementation)
            where = f"{implementation}, {dtype}"
            assert output.isfinite().all(), where
            for own, theirs in zip(gradients, wide_gradients, strict=True):  # unless it is itself too large
                assert own.isfinite().all() or theirs.abs().max() > torch.finfo(dtype).max, f"gradients, {where}"
            error = (output - expected).norm() / expected.norm()
            assert error < limit, f"{where}: {error:.3f}"


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_finite_and_close(attention, causal):
    spec = SLOTS["attention"].get(attention)
    if "causal" in spec.why_not if causal else not spec.bidirectional:
        pytest.skip("it has no such form")
    if HandOver.AXES in spec.reads and causal:
        pytest.skip("a decoder needs its own stack; tests/common/test_large_weights.py has it")
    check(attention, causal)


@pytest.mark.parametrize("attention", ["dense", "band_attention"])
@pytest.mark.parametrize("position", TERMS)
def test_terms(position, attention):
    """What positions add to scores, by the dense engine and by tiles of a pattern."""
    check(attention, position == "music_transformer", position)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_performer_with_vanishing_denominators(causal):
    """Queries and keys so long that products of their features leave the range of numbers: zeros, as for a query that
    sees no key, in both paths, and finite gradients."""
    spec = {"type": "performer", "num_features": 4, "chunk_size": 8}
    (layer,) = build_layers(spec, 1, causal, position="none")
    layer = layer.float()
    signed_permutations(layer, torch.Generator().manual_seed(0))
    states = long_inputs(2).float() * 3
    found = [run(layer, None, states, causal, implementation) for implementation in ("sdpa", "eager")]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    for gradient in (*found[0][1], *found[1][1]):
        assert gradient.isfinite().all()
