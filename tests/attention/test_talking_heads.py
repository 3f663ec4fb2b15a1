"""Talking heads against the equation, DeBERTa's talking heads, the folded form and dense attention."""

import copy

import pytest
import torch
from transformers import DebertaConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

from hf_xformers import XFormerConfig
from hf_xformers.attention.shared.query_blocks import over_query_blocks
from hf_xformers.attention.talking_heads import DYNAMIC
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    small_blocks,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

UNEQUAL = {"type": "talking_heads", "num_key_heads": 3, "num_value_heads": 5}
ALL_DYNAMIC = {"type": "talking_heads", "num_key_heads": 2, "num_value_heads": 3, "dynamic": DYNAMIC}
SPECS = {
    "plain": "talking_heads",
    "unequal": UNEQUAL,
    "first_only": {"type": "talking_heads", "mix_weights": False, "bias": False},
    "second_only": {"type": "talking_heads", "mix_scores": False},
    "dynamic": ALL_DYNAMIC,
    **{name: {"type": "talking_heads", "dynamic": (name,)} for name in DYNAMIC},
}
PATHS = ("literal", "blocks")


@pytest.fixture
def path(request):
    if request.param == "literal":
        yield {"implementation": "eager"}
    else:
        with small_blocks():
            yield {"implementation": "sdpa"}


each_path = pytest.mark.parametrize("path", PATHS, indirect=True)


def mixing_matrix(layer, static, dynamic, queries, keys, sizes):
    """P[b, i, j, from, to] in full."""
    matrix = torch.eye(*sizes, dtype=torch.float64) if static is None else static
    matrix = matrix.expand(queries.shape[0], queries.shape[1], keys.shape[1], *sizes)
    for name in dynamic:
        if name in layer.dynamic:
            tokens = queries if name[0] == "x" else keys
            own = layer.dynamic[name](tokens).view(*tokens.shape[:2], *sizes)
            matrix = matrix + (own[:, :, None] if name[0] == "x" else own[:, None])
    return matrix


@torch.no_grad()
def by_hand(layer, states, allowed, memory=None, bias=0.0):
    """Every mixing matrix of every pair of tokens, applied as it stands."""
    read = states if memory is None else memory
    q = split_heads(layer.q_proj(states), layer.head_dim)
    k, v = (split_heads(part(read), layer.head_dim) for part in (layer.k_proj, layer.v_proj))
    scores = torch.einsum("bkid,bkjd->bkij", q, k) / layer.head_dim**0.5
    first = mixing_matrix(layer, layer.score_mixing, ("x2l", "m2l"), states, read, (q.shape[1], HEADS))
    logits = torch.einsum("bkij,bijkh->bhij", scores, first) + bias
    weights = softmax_by_rows(logits, allowed)
    second = mixing_matrix(layer, layer.weight_mixing, ("x2w", "m2w"), states, read, (HEADS, v.shape[1]))
    mixed = torch.einsum("bhij,bijhv->bvij", weights, second)
    return layer.o_proj(torch.einsum("bvij,bvjd->bivd", mixed, v).flatten(2)), weights


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_equation(path, name, causal):
    (layer,) = build_layers(SPECS[name], causal=causal)
    states = vectors(4, 7)[:, :6] if causal else vectors(4, 6)
    for mask in (None, PADDING):
        (result,) = run_layers([layer], states, make_context(6, causal, padding_mask=mask, **path))
        output, weights = by_hand(layer, states, allowed_pairs(6, causal, mask))
        close(result.output.detach(), output)
        if path["implementation"] == "eager":
            close(result.weights.detach(), weights)


@each_path
@pytest.mark.parametrize("name", ["plain", "unequal", "dynamic"])
def test_cross_attention(path, name):
    (layer,) = build_layers(SPECS[name], cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 4), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        context = make_context(4, True, memory_padding_mask=mask, **path)
        found = run_layers([layer], states, context, memory)[0].output
        allowed = torch.ones(1, 1, 1, 6).bool() if mask is None else mask[:, None, None, :]
        close(found.detach(), by_hand(layer, states, allowed, memory)[0])


@each_path
def test_position_bias_after_the_first_mixing(path):
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    (layer,) = build_layers(UNEQUAL)
    context = make_context(6, padding_mask=PADDING, **path)
    context.shared["score_bias"] = position
    bias = position.block(context.query_index, context.key_index).detach()
    states = vectors(4, 6)
    expected = by_hand(layer, states, allowed_pairs(6, False, PADDING), bias=bias)[0]
    close(run_layers([layer], states, context)[0].output.detach(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_and_prepared_masks(causal):
    segments = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    (layer,) = build_layers("talking_heads", causal=causal)
    states = vectors(2, 6)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    expected = by_hand(layer, states, same & allowed_pairs(6, causal))[0]
    for implementation in ("eager", "sdpa"):
        with small_blocks():
            given = {"implementation": implementation, "segment_ids": segments}
            close(run_layers([layer], states, make_context(6, causal, **given))[0].output.detach(), expected)
            given = {"implementation": implementation, "explicit_mask": same & allowed_pairs(6, causal)}
            close(run_layers([layer], states, make_context(6, causal, **given))[0].output.detach(), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_deberta(padded):
    """Weight-copy parity with transformers' DeBERTa without its relative positions."""
    config = DebertaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, talking_head=True, relative_attention=False)
    torch.manual_seed(0)
    theirs = DisentangledSelfAttention(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    (ours,) = build_layers("talking_heads")
    with torch.no_grad():
        q, k, v = theirs.in_proj.weight.view(HEADS, 3, WIDTH // HEADS, WIDTH).unbind(1)
        for own, weight in ((ours.q_proj, q), (ours.k_proj, k), (ours.v_proj, v)):
            own.weight.copy_(weight.reshape(WIDTH, WIDTH))
        ours.q_proj.bias.copy_(theirs.q_bias)
        ours.k_proj.bias.zero_()
        ours.v_proj.bias.copy_(theirs.v_bias)
        ours.o_proj.weight.copy_(torch.eye(WIDTH))
        ours.o_proj.bias.zero_()
        ours.score_mixing.copy_(theirs.head_logits_proj.weight.t())
        ours.weight_mixing.copy_(theirs.head_weights_proj.weight.t())
    states = vectors(3, 6)
    mask = PADDING[:3] if padded else torch.ones(3, 6).bool()
    pairs = mask[:, None, None, :] & mask[:, None, :, None]
    with torch.no_grad():
        expected = theirs(states, pairs)[0]
        for implementation in ("eager", "sdpa"):
            with small_blocks():
                context = make_context(6, padding_mask=mask if padded else None, implementation=implementation)
                found = run_layers([ours], states, context)[0].output
            close(found[mask], expected[mask])


@each_path
def test_identity_is_multi_head_attention(path):
    (layer,), (dense,) = build_layers({"type": "talking_heads", "start": "identity"}), build_layers("dense")
    layer.initialize(layer.config, torch.nn.init)
    dense.load_state_dict({name: value for name, value in layer.state_dict().items() if "mixing" not in name})
    states = vectors(4, 6)
    expected = run_layers([dense], states, make_context(6, padding_mask=PADDING))[0].output
    close(run_layers([layer], states, make_context(6, padding_mask=PADDING, **path))[0].output, expected)


def test_folded_form():
    """Mixed scores are dense attention over all heads side by side, scaled by a column of the mixing matrix."""
    (layer,) = build_layers(UNEQUAL)
    states, d = vectors(2, 9), WIDTH // HEADS
    with torch.no_grad():
        q, k, v = (part(states)[:, None] for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        output = torch.zeros(2, 9, 5, d, dtype=torch.float64)
        for head in range(HEADS):
            factors = layer.score_mixing[:, head].repeat_interleave(d)
            sides = torch.nn.functional.scaled_dot_product_attention(q * factors, k, v, scale=d**-0.5)
            output += layer.weight_mixing[head][:, None] * sides[:, 0].view(2, 9, 5, d)
        with small_blocks():
            close(run_layers([layer], states, make_context(9))[0].output, layer.o_proj(output.flatten(2)))


def test_softmax_heads_have_no_order():
    (layer,) = build_layers(UNEQUAL)
    other, order = copy.deepcopy(layer), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        other.score_mixing.copy_(layer.score_mixing[:, order])
        other.weight_mixing.copy_(layer.weight_mixing[order])
    states = vectors(2, 6)
    outputs = [run_layers([one], states, make_context(6))[0].output for one in (layer, other)]
    close(*outputs)


def test_mask_before_mixing_would_leak():
    """Hidden scores that are large negative numbers before the mixing change what is visible after it."""
    (layer,) = build_layers("talking_heads")
    scores = torch.randn(HEADS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = torch.tensor([False, False, False, False, True, True])
    after = torch.softmax((layer.score_mixing.t() @ scores).masked_fill(hidden, -1e9), -1)
    before = torch.softmax(layer.score_mixing.t() @ scores.masked_fill(hidden, -1e9), -1)
    alone = torch.softmax(layer.score_mixing.t() @ scores[:, :4], -1)
    close(after[:, :4], alone)
    assert (before[:, :4] - alone).abs().max() > 0.1


@pytest.mark.parametrize("name", ["plain", "unequal", "dynamic"])
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_caches(name, kind):
    """Piece by piece, with any numbers of heads and with what keys' tokens add to the mixing."""
    (layer,) = build_layers(SPECS[name], causal=True)
    states = vectors(2, 6)
    expected = by_hand(layer, states, allowed_pairs(6, True))[0]
    cache = DynamicCache() if kind == "growing" else StaticCache(layer.config, max_cache_len=9)
    found, done = [], 0
    for length in (3, 1, 2):
        context = make_context(length, True, past=done)
        if kind == "static":
            context = make_context(length, True, past=done, key_index=torch.arange(9), fresh=False, static=True)
        with small_blocks(2):
            found.append(run_layers([layer], states[:, done : done + length], context, cache=cache)[0].output)
        done += length
    close(torch.cat(found, 1).detach(), expected)


@pytest.mark.parametrize("name", ["plain", "unequal", "dynamic"])
def test_memory_is_projected_once(name):
    (layer,) = build_layers(SPECS[name], cross=True, is_encoder_decoder=True)
    states, memory = vectors(2, 2), vectors(2, 6, seed=1)
    cache, context = EncoderDecoderCache(DynamicCache(), DynamicCache()), make_context(2, True)
    expected = run_layers([layer], states, context, memory)[0].output
    for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
        close(run_layers([layer], states, context, read, cache)[0].output, expected)


def test_start():
    (layer,) = build_layers(ALL_DYNAMIC, hidden_size=256, num_attention_heads=HEADS)
    layer.initialize(layer.config, torch.nn.init)
    for name, projection in layer.dynamic.items():
        assert 0.08 < projection.weight.std() * 256**0.5 < 0.12, name
        assert (projection.bias == 0).all()
    for mixing in (layer.score_mixing, layer.weight_mixing):
        bound = (6 / sum(mixing.shape)) ** 0.5
        assert 0.5 * bound < mixing.abs().max() <= bound


def test_what_is_kept():
    """Blocks of queries keep nothing in proportion to T x T."""
    (layer,) = build_layers("talking_heads")
    for length in (60, 120):
        states = vectors(1, length)
        with small_blocks(8):
            assert saved_sizes(lambda: run_layers([layer], states, make_context(length)))[0] <= length * WIDTH
    assert saved_sizes(lambda: run_layers([layer], states, make_context(120)))[0] == HEADS * 120 * 120


def test_blocks_join():
    """Any number of queries in any number of blocks; gradients as without blocks."""
    x, y = vectors(2, 7), vectors(2, 7, seed=1).requires_grad_()
    for rows in (1, 3, 7, 8):
        found = over_query_blocks(
            lambda begin, end, part, missing: (part * (1 + torch.arange(begin, end)[:, None])).sin(),
            7,
            rows,
            (y, 1),
            (None, 0),
        )
        expected = (y * (1 + torch.arange(7)[:, None])).sin()
        close(found, expected)
        close(*(torch.autograd.grad((result * x).sum(), y)[0] for result in (found, expected)))


def test_refusals():
    for fields, message in (
        ({"num_key_heads": 0}, "`num_key_heads` >= 1, got 0"),
        ({"num_key_heads": 3, "mix_scores": False}, "3 as `num_key_heads` and 4 attention heads needs the mixing"),
        ({"num_value_heads": 3, "mix_weights": False}, "3 as `num_value_heads`"),
        ({"dynamic": ("x2k",)}, "needs x2l, m2l, x2w, m2w under `dynamic`"),
        ({"dynamic": ("x2l",), "mix_scores": False}, "needs `mix_scores=True`"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={"type": "talking_heads", **fields})
    with pytest.raises(ValueError, match="does not group heads"):
        XFormerConfig(**GEOMETRY, attention="talking_heads", num_key_value_heads=2)


MIXES = {
    "talking_dynamic": {"attention": ALL_DYNAMIC, "position": "rotary", "residual": "pre_ln"},
    "talking_bias": {"attention": UNEQUAL, "position": {"type": "t5_relative_bias", "num_buckets": 8}},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    with small_blocks():
        check_contract(case)


@pytest.mark.parametrize("case", mixes({"talking": {"attention": ALL_DYNAMIC}}, ("decoder",)), ids=str)
def test_compile(case):
    with small_blocks(5):
        check_compile(case)


@each_path
def test_dropout_acts_on_mixed_weights(path):
    (layer,) = build_layers("talking_heads", attention_probs_dropout_prob=0.5)
    states = vectors(1, 6)
    expected = run_layers([layer], states, make_context(6, **path))[0].output.detach()
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack(
            [run_layers([layer.train()], states, make_context(6, **path))[0].output for _ in range(300)]
        )
    assert (draws[0] - draws[1]).abs().max() > 1e-3
    assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 300**0.5 + 1e-12).all()
