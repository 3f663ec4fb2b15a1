"""Localness against its equations, text by text; limits; the fold into queries and keys; strictness."""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig
from tests.attention.score_helpers import (
    GEOMETRY,
    PADDING,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    small_blocks,
    split_heads,
    vectors,
)
from tests.helpers import close

PATHS = ("eager", "sdpa")
each_path = pytest.mark.parametrize("path", PATHS)
KINDS = [{}, {"window": "fixed", "fixed_window": 3}, {"window": "layer"}, {"share_heads": False}]


def build(causal=False, cross=False, config=None, count=1, **fields):
    more = {**({"is_encoder_decoder": True} if cross else {}), **(config or {})}
    layers = build_layers({"type": "localness", "layers": 1, **fields}, count, causal, cross, **more)
    return layers if count > 1 else layers[0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@torch.no_grad()
def alone(layer, states, causal, memory=None):
    """One text without padding [T, D] -> output [T, D], and P and D of each head and query."""
    d, groups = layer.head_dim, layer.num_key_value_groups
    read = states if memory is None else memory
    q = split_heads(layer.q_proj(states)[None], d)[0]
    k, v = (split_heads(p(read)[None], d)[0].repeat_interleave(groups, 0) for p in (layer.k_proj, layer.v_proj))
    mixed, windows = torch.zeros(len(states), layer.num_heads, d).double(), {}
    for h in range(layer.num_heads):
        one = h % len(layer.predictor)
        for i in range(len(states)):
            seen = i + 1 if causal else len(read)
            hidden = torch.tanh(q[h, i] @ layer.predictor[one])
            centre = seen * sigmoid(hidden @ layer.centre[h])
            if layer.spec.window == "query":
                width = seen * sigmoid(hidden @ layer.width[h])
            elif layer.spec.window == "layer":
                width = seen * sigmoid(torch.tanh(k[h].mean(0) @ layer.width_predictor[one]) @ layer.width[h])
            else:
                width = layer.spec.fixed_window
            windows[h, i], std = (centre, width, seen), max(width / 2, 0.5)
            scores = [
                float(q[h, i] @ k[h, j]) / math.sqrt(d) - (j + 1 - centre) ** 2 / (2 * std**2) for j in range(seen)
            ]
            weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), -1)
            mixed[i, h] = weights @ v[h, :seen]
    return layer.o_proj(mixed.flatten(1)), windows


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_equation(fields, causal, path):
    if causal and fields.get("window") == "layer":
        pytest.skip("it is refused")
    layer, states = build(causal, **fields), vectors(4, 6)
    for mask in (None, PADDING):
        with small_blocks(2):
            context = make_context(6, causal, padding_mask=mask, implementation=path)
            output = run_layers([layer], states, context)[0].output.detach()
        for row in range(4):
            own = torch.ones(6, dtype=torch.bool) if mask is None else mask[row]
            if own.any():
                close(output[row][own], alone(layer, states[row][own], causal)[0])
        assert output.isfinite().all()


@each_path
@pytest.mark.parametrize("config", [{"num_key_value_heads": 2}, {"head_dim": 6}], ids=str)
def test_geometry(config, path):
    layer, states = build(config=config), vectors(1, 6)
    output = run_layers([layer], states, make_context(6, implementation=path))[0].output.detach()
    close(output[0], alone(layer, states[0], False)[0])


@each_path
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_cross_attention(fields, path):
    """Windows of the memory, whose whole length is known, in a decoder, too."""
    layer, states, memory = build(cross=True, **fields), vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, True, memory_padding_mask=PADDING, implementation=path)
    output = run_layers([layer], states, context, memory)[0].output.detach()
    for row in range(3):
        close(output[row], alone(layer, states[row], False, memory[row][PADDING[row]])[0])


def test_gradients_of_both_paths():
    layer, states = build(), vectors(2, 9)
    probe, slopes = vectors(2, 9, seed=4), []
    for path in PATHS:
        with small_blocks(2):
            output = run_layers([layer], states, make_context(9, implementation=path))[0].output
            slopes.append(torch.autograd.grad((output * probe).sum(), list(layer.parameters())))
    for one, other in zip(*slopes, strict=True):
        close(one, other)
    assert all(slope.abs().max() > 1e-9 for slope in slopes[0][:3])


def test_windows_lie_inside_the_text():
    _, windows = alone(build(), vectors(1, 9)[0], False)
    assert all(0 < centre < seen and 0 < width < seen for centre, width, seen in windows.values())


def test_wide_windows_are_dense():
    layer, states = build(window="fixed", fixed_window=1e9), vectors(2, 9)
    (dense,) = build_layers("dense")
    dense.load_state_dict(layer.state_dict(), strict=False)
    expected = run_layers([dense], states, make_context(9))[0].output
    close(run_layers([layer], states, make_context(9))[0].output, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_fold(causal):
    """-(j - P)^2 c = -c j^2 + 2 c P j and a number of the row: two further columns of queries and keys."""
    layer, states = build(causal), vectors(1, 9)
    _, windows = alone(layer, states[0], causal)
    q, k, v = (split_heads(p(states), layer.head_dim) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    place = torch.arange(1.0, 10.0).double()
    columns = torch.zeros(1, layer.num_heads, 9, 2).double()
    for (h, i), (centre, width, _) in windows.items():
        sharpness = 0.5 / max(width / 2, 0.5) ** 2
        columns[0, h, i] = torch.tensor([-sharpness, 2 * sharpness * centre], dtype=torch.float64)
    of_keys = torch.stack((place**2, place), -1).expand(1, layer.num_heads, -1, -1)
    query = torch.cat((q / layer.head_dim**0.5, columns), -1)
    mixed = F.scaled_dot_product_attention(query, torch.cat((k, of_keys), -1), v, is_causal=causal, scale=1.0)
    close(
        run_layers([layer], states, make_context(9, causal))[0].output, layer.o_proj(mixed.transpose(1, 2).flatten(2))
    )


def test_decoder_windows_do_not_know_the_length():
    """A window that were a part of the whole text would tell how long that will be."""
    layer, states = build(True), vectors(1, 12)
    short = run_layers([layer], states[:, :7], make_context(7, True))[0].output
    close(run_layers([layer], states, make_context(12, True))[0].output[:, :7], short)
    _, of_whole = alone(layer, states[0], False)
    assert any(abs(of_whole[0, i][0] - alone(layer, states[0], True)[1][0, i][0]) > 0.1 for i in range(7))


def test_upper_layers_are_dense():
    layers = build(count=3, layers=None)  # two of three
    assert [layer.is_local for layer in layers] == [True, True, False]
    assert {name for name, _ in layers[2].named_parameters()} == {
        f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")
    }
    (dense,), states = build_layers("dense"), vectors(2, 6)
    dense.load_state_dict(layers[2].state_dict())
    close(
        run_layers(layers[2:], states, make_context(6))[0].output,
        run_layers([dense], states, make_context(6))[0].output,
    )


def test_nothing_quadratic_is_kept():
    layer = build()
    for length in (600, 1200):
        largest = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))[0]
        assert largest <= length * 64


MIXES = {
    "localness_rotary": {"attention": {"type": "localness", "layers": 2}, "position": "rotary"},
    "localness_fixed": {
        "attention": {"type": "localness", "window": "fixed", "fixed_window": 2},
        "residual": "pre_ln",
    },
}


@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fixed_window": 0}, "`fixed_window` > 0"),
        ({"layers": 0}, "`layers` >= 1.*'dense'"),
        ({"window": "layer"}, "later ones among them.*cannot stand in a decoder; use `window='query'`"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "localness", **fields})
