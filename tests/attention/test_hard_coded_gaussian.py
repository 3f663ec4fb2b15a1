"""Hard-coded Gaussian attention against its definition, token by token."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.hard_coded_gaussian import BLOCK
from hf_xformers.core.cache import XFormerCache
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    split_heads,
    vectors,
)
from tests.helpers import close

PATHS = ("eager", "sdpa")
each_path = pytest.mark.parametrize("path", PATHS)


def build(causal=False, cross=False, config=None, **fields):
    more = {**({"is_encoder_decoder": True} if cross else {}), **(config or {})}
    return build_layers({"type": "hard_coded_gaussian", **fields}, 1, causal, cross, **more)[0]


@torch.no_grad()
def by_hand(layer, states, offsets, std=1.0, causal=False, mask=None, renormalize=False, ratio=1.0, read=None):
    """The sum over all tokens of the text alone, one query and one head at a time. read: (memory, its mask)."""
    source, seen = (states, mask) if read is None else read
    value = split_heads(layer.v_proj(source), layer.head_dim)
    value = value.repeat_interleave(layer.num_key_value_groups, 1)
    length, keys = states.shape[1], source.shape[1]
    mixed = torch.zeros(states.shape[0], length, layer.num_heads, layer.head_dim, dtype=torch.float64)
    for row in range(states.shape[0]):
        own = [i for i in range(length) if mask is None or mask[row, i]]
        others = [j for j in range(keys) if seen is None or seen[row, j]]
        for place, i in enumerate(own):
            for h in range(layer.num_heads):
                centre = ratio * place + offsets[h % len(offsets)]
                away = {j: (n - centre) ** 2 for n, j in enumerate(others) if not causal or j <= i}
                nearest = min(away.values()) if renormalize else 0.0  # a factor that the sum takes out again
                total = 0.0
                for j, square in away.items():
                    weight = math.exp(-(square - nearest) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
                    total += weight
                    mixed[row, i, h] += weight * value[row, h, j]
                if renormalize:
                    mixed[row, i, h] /= total
    return layer.o_proj(mixed.flatten(2))


def check(layer, states, path, causal, mask=None, expected=None, memory=None, **given):
    context = make_context(states.shape[1], causal, padding_mask=mask, implementation=path, **given)
    found = run_layers([layer], states, context, memory)[0]
    real = torch.ones(*states.shape[:2], dtype=torch.bool) if mask is None else mask
    close(found.output[real].detach(), expected[real])
    return found


@each_path
@pytest.mark.parametrize("mask", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_definition(causal, renormalize, mask, path):
    layer, states = build(causal, renormalize=renormalize), vectors(4, 6)
    offsets = (-1, 0) if causal else (-1, 1)
    expected = by_hand(layer, states, offsets, causal=causal, mask=mask, renormalize=renormalize)
    check(layer, states, path, causal, mask, expected)


@each_path
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"offsets": (0, 3, -2, 1), "std": 0.5}, {}),
        ({"offsets": (2,), "std": 2.0}, {"num_key_value_heads": 2}),
        ({"std": 1.5}, {"head_dim": 6}),
    ],
    ids=["offsets", "grouped", "width"],
)
def test_fields(fields, config, path):
    layer, states = build(config=config, **fields), vectors(2, 9)
    expected = by_hand(layer, states, fields.get("offsets", (-1, 1)), fields["std"])
    check(layer, states, path, False, expected=expected)


@pytest.mark.parametrize("std", [1.0, 3.0, 6.0])  # kernels of 19 (padded to 25), 51 and 99 taps
@pytest.mark.parametrize("causal", [False, True])
def test_long_texts(causal, std):
    layer, states = build(causal, std=std), vectors(1, 150)
    expected = by_hand(layer, states, (-1, 0) if causal else (-1, 1), std, causal)
    check(layer, states, "sdpa", causal, expected=expected)


def weights_of(causal, offset, length=31, **fields):
    layer = build(causal, offsets=(offset,), **fields)
    context = make_context(length, causal, output_attentions=True)
    return run_layers([layer], vectors(1, length), context)[0].weights[0, 0].detach()


def test_sums_of_weights():
    """The theta series inside a text, less at its ends and in a decoder: nothing is divided by a sum."""
    sums = weights_of(False, -1).sum(-1)
    assert sums[15].item() == pytest.approx(1.0000000053, abs=1e-9) and sums[0].item() == pytest.approx(
        0.3005, abs=1e-4
    )
    assert weights_of(True, 0).sum(-1)[-1].item() == pytest.approx(0.6995, abs=1e-4)
    assert weights_of(True, -1).sum(-1)[-1].item() == pytest.approx(0.9414, abs=1e-4)
    close(weights_of(True, -1, renormalize=True).sum(-1), torch.ones(31).double())


def test_narrow_is_a_shift():
    """With a small deviation, divided by the sum, a head reads the token at its offset, or the nearest there is."""
    layer, states = build(offsets=(-1,), std=0.1, renormalize=True), vectors(1, 9)
    found = run_layers([layer], states, make_context(9))[0].output
    value = layer.v_proj(states)
    shifted = value[:, [0, *range(8)]]
    close(found, layer.o_proj(shifted))


def test_linear_and_equivariant():
    layer = build()
    run = lambda x: run_layers([layer], x, make_context(x.shape[1]))[0].output  # noqa: E731
    one, other, none = vectors(1, 40), vectors(1, 40, seed=1), torch.zeros(1, 40, WIDTH).double()
    close(run(2 * one - other) - run(none), 2 * (run(one) - run(none)) - (run(other) - run(none)))
    close(run(one)[:, 15:25], run(one[:, 3:])[:, 12:22])


@pytest.mark.parametrize("renormalize", [False, True])
def test_state_of_constant_size(renormalize):
    layer, states = build(True, renormalize=renormalize, std=0.5), vectors(2, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :12] = False
    expected = run_layers([layer], states, make_context(30, True, padding_mask=mask))[0].output
    cache, found, past = XFormerCache([layer.spec.cache_layer(None)]), [], 0
    for size in (1, 7, 1, 1, 14, 1, 5):
        context = make_context(size, True, past=past, padding_mask=mask[:, : past + size])
        found.append(run_layers([layer], states[:, past : past + size], context, cache=cache)[0].output)
        past += size
    close(torch.cat(found, 1)[mask], expected[mask])
    assert cache.layers[0].state["values"].shape == (2, HEADS, layer.reach, WIDTH // HEADS) and layer.reach == 5
    assert cache.get_seq_length() == 30


@each_path
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(padded, renormalize, path):
    """Places are counted from the first real token on either side."""
    layer = build(cross=True, ratio=1.5, renormalize=renormalize)
    states, memory = vectors(4, 6), vectors(4, 9, seed=1)
    mask, seen = None, None
    if padded:
        mask = PADDING
        seen = torch.ones(4, 9, dtype=torch.bool)
        seen[0, 5:], seen[1, :4], seen[3] = False, False, False
    if padded and renormalize:
        seen[3] = True  # a sum over nothing is no expectation
    expected = by_hand(layer, states, (-1, 0, 1), 1.0, False, mask, renormalize, 1.5, (memory, seen))
    check(layer, states, path, True, mask, expected, memory, memory_padding_mask=seen)


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.3])
def test_cross_attention_in_blocks(ratio):
    layer = build(cross=True, ratio=ratio, offsets=(-3, 0, 2, 7))
    states, memory = vectors(1, 130), vectors(1, 160, seed=1)
    expected = by_hand(layer, states, (-3, 0, 2, 7), ratio=ratio, read=(memory, None))
    check(layer, states, "sdpa", True, expected=expected, memory=memory)


@each_path
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [20, 2 * BLOCK + 1], ids=["a block", "blocks that see none of it"])
def test_renormalized_beyond_the_memory(length, padded, path):
    """A target that goes on far behind its source reads the source's end, on either path and in any precision."""
    layer = build(cross=True, ratio=1.5, renormalize=True, offsets=(-12, 3))
    states, memory = vectors(2, length), vectors(2, 5, seed=1)
    seen = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]).bool() if padded else None
    expected = by_hand(layer, states, (-12, 3), renormalize=True, ratio=1.5, read=(memory, seen))
    check(layer, states, path, True, expected=expected, memory=memory, memory_padding_mask=seen)
    half, context = layer.to(torch.float16), make_context(length, True, implementation=path, memory_padding_mask=seen)
    found = run_layers([half], states.half(), context, memory.half())[0].output
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_renormalized_ends_in_half_precision():
    layer, states = build(offsets=(-8, 8), renormalize=True), vectors(1, 6)
    expected = by_hand(layer, states, (-8, 8), renormalize=True)
    found = run_layers([layer.to(torch.float16)], states.half(), make_context(6))[0].output
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_no_queries_and_keys():
    layer = build()
    assert {name for name, _ in layer.named_parameters()} == {
        f"{part}_proj.{kind}" for part in "vo" for kind in ("weight", "bias")
    }


MIXES = {
    "gaussian_renormalized": {"attention": {"type": "hard_coded_gaussian", "renormalize": True, "std": 0.7}},
}


@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    ("fields", "config", "message"),
    [
        ({"std": 0}, {}, "`std` > 0"),
        ({"ratio": 0.0}, {}, "`ratio` > 0"),
        ({"offsets": ()}, {}, "at least one number"),
        ({"offsets": (0, 1, 2)}, {}, "3 `offsets`.*must divide `num_attention_heads` 4"),
        ({"offsets": (1, 2)}, {"is_decoder": True}, "all `offsets` .1, 2. are later ones"),
        ({"offsets": (20,), "renormalize": True}, {}, "more than 12 times `std`"),
    ],
)
def test_refusals(fields, config, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**{**GEOMETRY, **config}, attention={"type": "hard_coded_gaussian", **fields})


def test_rotation_has_no_place():
    with pytest.raises(ValueError, match="rotates queries and keys, which attention 'hard_coded_gaussian' has no"):
        XFormerConfig(**GEOMETRY, attention="hard_coded_gaussian", position="rotary")


def test_norms_without_use_are_refused():
    """As cross-attention it reads places of the memory and nothing of its own input."""
    fields = {**GEOMETRY, "residual": "pre_ln", "is_encoder_decoder": True}
    with pytest.raises(ValueError, match="residual 'pre_ln' would have a norm without use"):
        XFormerConfig(**fields, cross_attention="hard_coded_gaussian")
    XFormerConfig(**fields, attention="hard_coded_gaussian")
