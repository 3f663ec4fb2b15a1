"""Collaborative attention against its equation and multi-head attention, and trained models as such."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.conversion import swap_components
from hf_xformers.conversion.shared_heads import relative_error, shared_factors
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    vectors,
)
from tests.helpers import close, make_strong, tokens

HEAD = WIDTH // HEADS
NAME = "collaborative_attention"


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_is_one(causal):
    """The product of queries and keys of each head, biases included; those of keys cancel."""
    (dense,), (layer,) = build_layers("dense", causal=causal), build_layers(NAME, causal=causal)
    state = {name: value for name, value in dense.state_dict().items() if name[:2] in ("v_", "o_")}
    biases, keys = dense.q_proj.bias.view(HEADS, HEAD), dense.k_proj.weight.view(HEADS, HEAD, WIDTH)
    state |= {"q_proj.weight": dense.q_proj.weight, "k_proj.weight": dense.k_proj.weight}
    state["content_proj.weight"] = torch.stack([biases[head] @ keys[head] for head in range(HEADS)])
    state["mixing"] = torch.block_diag(*torch.ones(HEADS, 1, HEAD)).double()
    layer.load_state_dict(state)
    found = [
        run_layers([each], vectors(4, 6), make_context(6, causal, padding_mask=PADDING))[0].output
        for each in (layer, dense)
    ]
    close(*(x.detach() for x in found))
    layer.content_proj.weight.data.zero_()
    layer.mixing.data.fill_(1.0)
    (result,) = run_layers([layer], vectors(4, 6), make_context(6, implementation="eager"))
    close(result.weights, result.weights[:, :1].expand_as(result.weights))  # all channels to all: the same maps


def some_heads(heads=3, channels=4, width=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(heads, channels, width, generator=generator, dtype=torch.float64) for _ in range(2))


def test_factors():
    """Exact from H d channels on; below, the error falls with their number, and it is that of the whole tensor."""
    queries, keys = some_heads()
    whole = torch.einsum("hcx,hcy->hxy", queries, keys)
    errors = []
    for rank in (2, 4, 6, 8, 10, 12, 15):
        left, right, mixing = shared_factors(queries, keys, rank)
        assert left.shape == right.shape == (rank, 10) and mixing.shape == (3, rank)
        made = torch.einsum("rx,hr,ry->hxy", left, mixing, right)
        errors.append(float((made - whole).norm() / whole.norm()))
        assert abs(errors[-1] - relative_error(queries, keys, left, right, mixing)) < 1e-7
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(errors)) and errors[-1] < 1e-12
    assert errors[0] < 1
    again = shared_factors(queries, keys, 6)
    assert all(torch.equal(one, other) for one, other in zip(again, shared_factors(queries, keys, 6)))
    # Heads that do share channels are found out: one product in all heads has as many as one head.
    shared = [x[:1].expand(3, -1, -1) for x in (queries, keys)]
    assert relative_error(*shared, *shared_factors(*shared, 4)) < 1e-6
    assert relative_error(*shared, *shared_factors(*shared, 4, steps=1)) < 1e-6  # they are the start


@pytest.mark.parametrize(("width", "groups"), [(None, None), (32, None), (None, 2), (12, None)])
def test_a_trained_model(width, groups):
    """Converted without loss from H d shared channels on, and nearer the more there are below."""
    source = make_strong(XFormerForMaskedLM(XFormerConfig(**GEOMETRY, num_key_value_heads=groups)).double()).eval()
    changes = {"num_key_value_heads": None} if groups else {}
    ids = tokens(2, 9, high=50)
    moved = []
    for shared in (width,) if width != 12 else (4, 12):
        attention = {"type": NAME, "shared_width": shared}
        target, report = swap_components(source, attention=attention, measure=False, **changes)
        assert not report.new
        with torch.no_grad():
            moved.append(float((target(ids).logits - source(ids).logits).abs().max()))
    assert moved[-1] < (1e-12 if width != 12 else 0.7 * moved[0])
    if width == 12:
        assert any("relative error" in how for _, _, how in report.derived)
