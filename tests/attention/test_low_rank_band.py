"""Low-rank and band attention against both softmaxes written out, its limits, and its rank."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig
from tests.attention.linear_helpers import check_no_future, in_pieces
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
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

D, R = WIDTH // HEADS, 2
SPEC = {"type": "low_rank_band", "low_rank": R, "band_width": 1}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_shape = pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])


def repeated(x):
    return x.repeat_interleave(HEADS // x.shape[1], 1)


@torch.no_grad()
def low_by_hand(layer, states, read, pairs):
    """Output [B, T, H, d] and weights of the module of low rank."""
    rank = layer.spec.low_rank
    q, k = (repeated(split_heads(p(x), rank)) for p, x in ((layer.low_q_proj, states), (layer.low_k_proj, read)))
    weights = softmax_by_rows(q @ k.mT / rank**0.5, pairs)
    return (weights @ repeated(split_heads(layer.low_v_proj(read), D))).transpose(1, 2), weights


@torch.no_grad()
def by_hand(layer, states, pairs):
    far, far_weights = low_by_hand(layer, states, states, pairs)
    q, k, v = (repeated(split_heads(part(states), D)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    place = torch.arange(states.shape[1])
    near_weights = softmax_by_rows(
        q @ k.mT / D**0.5, pairs & ((place[:, None] - place).abs() <= layer.spec.band_width)
    )
    near, share = (near_weights @ v).transpose(1, 2), 0.5
    how = layer.spec.combine
    if how == "gate":
        share = 1 / (1 + (-layer.gate).exp())[:, None]
    both = {
        "sum": lambda: far + near,
        "mean": lambda: (far + near) / 2,
        "gate": lambda: share * far + (1 - share) * near,
        "concat": lambda: torch.cat([far, near], 2),
    }[how]()
    share = share if how != "gate" else share[..., None]
    return layer.o_proj(both.flatten(2)), share * far_weights + (1 - share) * near_weights


@each_path
@each_shape
@pytest.mark.parametrize("combine", ["sum", "mean", "gate", "concat"])
def test_equation(implementation, causal, combine):
    for fields in ({}, {"num_key_value_heads": 2}):
        (layer,) = build_layers({**SPEC, "combine": combine}, causal=causal, **fields)
        for length, mask in ((6, None), (6, PADDING), (1, None)):
            states = vectors(4, length)
            real = torch.ones(4, length).bool() if mask is None else mask
            context = make_context(length, causal, padding_mask=mask, implementation=implementation)
            (result,) = run_layers([layer], states, context)
            output, weights = by_hand(layer, states, allowed_pairs(length, causal, mask))
            close(result.output[real].detach(), output[real])
            close(result.output[3].detach(), output[3])
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows)


@each_path
def test_cross_attention(implementation):
    (layer,) = build_layers(SPEC, cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        pairs = torch.ones(1, 1, 3, 6).bool() if mask is None else mask[:, None, None]
        context = make_context(3, True, memory_padding_mask=mask, implementation=implementation)
        expected = layer.o_proj(low_by_hand(layer, states, memory, pairs)[0].flatten(2)).detach()
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)


@each_shape
def test_either_part_alone_becomes_exact_attention(causal):
    """A band as wide as the text, or queries and keys of full rank, the other part having no values."""
    states = vectors(2, 6)
    for fields, names, other in (
        ({"band_width": 5}, ("q_proj", "k_proj", "v_proj"), "low_v_proj"),
        ({"low_rank": D}, ("low_q_proj", "low_k_proj", "low_v_proj"), "v_proj"),
    ):
        (layer,) = build_layers({**SPEC, **fields}, causal=causal)
        with torch.no_grad():
            for parameter in getattr(layer, other).parameters():
                parameter.zero_()
            q, k, v = (split_heads(getattr(layer, name)(states), D) for name in names)
            expected = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
            close(run_layers([layer], states, make_context(6, causal))[0].output, layer.o_proj(expected), 1e-12)


def test_rank_and_reach():
    """Scores of the one part have rank r; nothing beyond the band reaches the other."""
    (layer,) = build_layers({**SPEC, "low_rank": D - 1})
    states = vectors(1, 9)
    with torch.no_grad():
        q, k = (split_heads(p(states), D - 1) for p in (layer.low_q_proj, layer.low_k_proj))
        assert int(torch.linalg.matrix_rank(q @ k.mT, rtol=1e-10).max()) == D - 1
        for parameter in layer.low_v_proj.parameters():
            parameter.zero_()
        changed = states.clone()
        changed[:, 6] += 1
        outputs = [run_layers([layer], x, make_context(9))[0].output for x in (states, changed)]
    moved = (outputs[0] - outputs[1]).abs().amax(-1)[0] > 1e-9
    assert moved.tolist() == [5 <= i <= 7 for i in range(9)]


@pytest.mark.parametrize("training", [False, True])
def test_no_future(training):
    (layer,) = build_layers(SPEC, causal=True, attention_probs_dropout_prob=0.5)
    check_no_future(layer, vectors(2, 11), training)


def test_cache():
    (layer,) = build_layers(SPEC, causal=True, num_key_value_heads=2)
    states, mask = vectors(2, 9), torch.ones(2, 9).bool()
    mask[0, :3] = False
    with torch.no_grad():
        for given in (None, mask):
            expected = by_hand(layer, states, allowed_pairs(9, True, given))[0]
            real = torch.ones_like(mask) if given is None else given
            for pieces in ((1,) * 9, (4, 1, 3, 1)):
                close(in_pieces(layer, states, pieces, given)[0][real], expected[real])


def test_what_is_kept():
    for causal in (False, True):
        (layer,) = build_layers(SPEC, causal=causal)
        for length in (64, 256):
            sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, causal)))
            assert sizes[0] <= length * WIDTH * 2, sizes[:3]


def test_refusals():
    for fields, message in (
        ({"low_rank": 0}, "`low_rank` >= 1, got 0"),
        ({"low_rank": 5}, "at most the head width 4, got 5"),
        ({"band_width": -1}, "`band_width` >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={**SPEC, **fields})
    with pytest.raises(ValueError, match="rotates queries and keys"):
        XFormerConfig(**GEOMETRY, attention=SPEC, position="rotary")


MIXES = {
    "low_rank": {"attention": {**SPEC, "combine": "gate"}, "residual": "pre_ln", "num_key_value_heads": 2},
}
CROSS = {"low_rank_cross": {"attention": {**SPEC, "combine": "concat"}, "cross_attention": SPEC}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", [*mixes(MIXES), *mixes(CROSS, ("seq2seq",))], ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    "case", mixes({"low_rank": {"attention": SPEC, "num_hidden_layers": 1}}, ("decoder",)), ids=str
)
def test_compile(case):
    check_compile(case)
