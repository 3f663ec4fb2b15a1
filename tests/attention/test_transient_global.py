"""LongT5's transient global attention against a loop over tokens, its limits, and transformers."""

import pytest
import torch
from transformers import LongT5Config
from transformers.models.longt5.modeling_longt5 import LongT5TransientGlobalAttention

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.ops.side_keys import joined
from hf_xformers.position.t5_relative_bias import relative_buckets
from tests.attention.pattern_helpers import SIDES, pad_mask
from tests.attention.score_helpers import (
    GEOMETRY,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    split_heads,
    vectors,
)
from tests.helpers import close, tokens

SPEC = {"type": "transient_global", "window_size": 2, "block_size": 3, "num_buckets": 4, "max_distance": 3}


@torch.no_grad()
def one_text(layer, x, table):
    """The equation for one text [1, n, D] without padding, token by token."""
    s, n, width = layer.spec, x.shape[1], layer.head_dim
    count = n // s.block_size
    block = [min(i // s.block_size, count - 1) for i in range(n)]
    sums = [x[0, [i for i in range(n) if block[i] == b]].sum(0) for b in range(count)]
    sides = layer.summary_norm(torch.stack(sums))[None] if count else x[:, :0]
    names = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (split_heads(proj(x), width) for proj in names)
    side_k, side_v = (proj(sides).unflatten(-1, (k.shape[1], width)).transpose(1, 2) for proj in names[1:])
    k, v, side_k, side_v = (t.repeat_interleave(layer.num_key_value_groups, 1) for t in (k, v, side_k, side_v))
    output = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for i in range(n):
            near = [j for j in range(n) if abs(i - j) <= s.window_size]
            scores = [q[0, head, i] @ k[0, head, j] * layer.scaling for j in near]
            for b in range(count):
                distance = torch.tensor(b - block[i])
                bucket = relative_buckets(distance, bidirectional=True, num_buckets=4, max_distance=3)
                scores.append(q[0, head, i] @ side_k[0, head, b] * layer.scaling + table[bucket, head])
            values = torch.cat([v[0, head, near], side_v[0, head]])
            output[0, head, i] = torch.softmax(torch.stack(scores), 0) @ values
    return layer.o_proj(output.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2, "normalization": "rms_norm"}], ids=["", "grouped"])
def test_equation(fields):
    layers = build_layers(SPEC, 2, **fields)
    table = layers[0].block_bias.weight
    for length, real in ((13, 8), (9, 2), (2, 1), (1, 1)):
        states = vectors(2, length)
        for side in SIDES if length > 1 else ("none",):
            mask, found = pad_mask(length, real, side), {}
            for implementation in ("eager", "sdpa"):
                given = states.clone().requires_grad_()
                context = make_context(length, padding_mask=mask, implementation=implementation)
                result = run_layers(layers, given, context)
                for row in range(2):
                    kept = torch.ones(length, dtype=torch.bool) if mask is None else mask[row]
                    if not kept.any():
                        continue
                    text = states[row : row + 1, kept]
                    for layer, each in zip(layers, result, strict=True):
                        expected = one_text(layer, text, table)
                        close(each.output[row : row + 1, kept].detach(), expected)
                        text = text + expected
                real_outputs = result[-1].output if mask is None else result[-1].output[mask]
                found[implementation] = torch.autograd.grad(
                    real_outputs.sin().sum(), (given, table), allow_unused=True
                )
            for fast, literal in zip(found["sdpa"], found["eager"], strict=True):
                assert (fast is None) == (literal is None)
                if fast is not None:
                    close(fast, literal, 1e-8)
                    assert fast.isfinite().all()


def test_weights_of_tokens():
    """The weights of tokens are what is left by the summaries."""
    (layer,) = build_layers(SPEC, 1)
    states = vectors(1, 10)
    weights = run_layers([layer], states, make_context(10, implementation="eager"))[0].weights
    assert weights.shape == (1, 4, 10, 10)
    assert (weights.sum(-1) < 1).all() and (weights[..., 0, 3:] == 0).all()


def test_transformers_layer():
    config = LongT5Config(
        d_model=16, d_kv=4, num_heads=4, local_radius=2, global_block_size=4, relative_attention_num_buckets=4,
        relative_attention_max_distance=3, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LongT5TransientGlobalAttention(config, has_relative_attention_bias=True).double().eval()
    spec = {**SPEC, "block_size": 4, "bias": False, "scale": 1.0}
    (ours,) = build_layers(spec, 1, normalization="rms_norm", layer_norm_eps=1e-6)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.zero_()
        for mine, other in zip("qkvo", (theirs.q, theirs.k, theirs.v, theirs.o), strict=True):
            getattr(ours, f"{mine}_proj").weight.copy_(other.weight)
        theirs.global_input_layer_norm.weight.copy_(ours.summary_norm.weight)
        theirs.global_relative_attention_bias.weight.copy_(ours.block_bias.weight)
    mask = torch.arange(15)[None] < torch.tensor([15, 7, 9])[:, None]
    states = vectors(3, 15) * 0.5
    expected = theirs(states, mask=mask.long())[0]
    output = run_layers([ours], states, make_context(15, padding_mask=mask))[0].output
    close(output[mask].detach(), expected[mask].detach(), 1e-5)  # their layer norm counts in float32


def test_norms_of_single_layers():
    """Layers may normalise their summaries in different ways."""
    other = {1: {"normalization": "rms_norm"}}
    model = XFormerModel(XFormerConfig(**GEOMETRY, attention=SPEC, position="none", per_layer_config=other))
    summaries = [type(layer.attention.summary_norm) for layer in model.trunk.layers]
    assert summaries[0] is summaries[2] is not summaries[1]
    assert model(tokens(2, 9, high=50)).last_hidden_state.isfinite().all()


def test_union_of_softmaxes():
    scores, values = torch.randn(2, 3, 4, 7).double(), torch.randn(2, 3, 7, 5).double()
    scores[0, 0, 0] = -torch.inf
    parts = [(scores[..., :3], values[:, :, :3]), (scores[..., 3:], values[:, :, 3:])]
    found = joined(*(((s.softmax(-1).nan_to_num(0.0)) @ v, s.logsumexp(-1)) for s, v in parts))
    close(found, scores.softmax(-1).nan_to_num(0.0) @ values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": {**SPEC, "block_size": 0}}, "`block_size` >= 1, got 0"),
        ({"attention": {**SPEC, "num_buckets": 5}}, "even and at least 4, got 5"),
        ({"attention": {**SPEC, "max_distance": 1}}, "above a quarter of `num_buckets`"),
        ({"attention": SPEC, "is_decoder": True}, "a token reads the summary of its own block"),
        ({"cross_attention": SPEC, "is_encoder_decoder": True}, "transient_global"),
        ({"attention": "dense", "per_layer_config": {1: {"attention": SPEC}}}, "layer 0"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**{**GEOMETRY, **fields})


@pytest.mark.parametrize(
    "case",
    mixes(
        {
            "transient_global": {"attention": SPEC, "position": {"type": "t5_relative_bias", "max_distance": 20}},
            "transient_global_rotary": {"attention": {**SPEC, "score_cap": 5.0}, "position": "rotary"},
        },
        ("encoder",),
    ),
    ids=str,
)
def test_contract(case):
    check_contract(case)
