"""Hard-coded Gaussian attention against its definition, token by token."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.hard_coded_gaussian import BLOCK
from tests.attention.references.softmax import hard_coded_gaussian as by_equation
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.helpers import close

PATHS = ("eager", "sdpa")
each_path = pytest.mark.parametrize("path", PATHS)


def build(causal=False, cross=False, config=None, **fields):
    more = {**({"is_encoder_decoder": True} if cross else {}), **(config or {})}
    return build_layers({"type": "hard_coded_gaussian", **fields}, 1, causal, cross, **more)[0]


@pytest.mark.parametrize("std", [1.0, 3.0, 6.0])  # kernels of 19 (padded to 25), 51 and 99 taps
@pytest.mark.parametrize("causal", [False, True])
def test_long_texts(causal, std):
    layer, states = build(causal, std=std), vectors(1, 150)
    close(
        run_layers([layer], states, make_context(150, causal))[0].output, by_equation(layer, states, None, causal)[0]
    )


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


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.3])
def test_cross_attention_in_blocks(ratio):
    layer = build(cross=True, ratio=ratio, offsets=(-3, 0, 2, 7))
    states, memory = vectors(1, 130), vectors(1, 160, seed=1)
    found = run_layers([layer], states, make_context(130, True), memory)[0].output
    close(found, by_equation(layer, states, memory)[0])


@each_path
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [20, 2 * BLOCK + 1], ids=["a block", "blocks that see none of it"])
def test_renormalized_beyond_the_memory(length, padded, path):
    """A target that goes on far behind its source reads the source's end, on either path and in any precision."""
    layer = build(cross=True, ratio=1.5, renormalize=True, offsets=(-12, 3))
    states, memory = vectors(2, length), vectors(2, 5, seed=1)
    seen = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]).bool() if padded else None
    texts = [memory[row : row + 1, slice(None) if seen is None else seen[row]] for row in range(2)]
    expected = torch.cat([by_equation(layer, states[row : row + 1], text)[0] for row, text in enumerate(texts)])
    context = make_context(length, True, implementation=path, memory_padding_mask=seen)
    close(run_layers([layer], states, context, memory)[0].output, expected)
    half, context = layer.to(torch.float16), make_context(length, True, implementation=path, memory_padding_mask=seen)
    found = run_layers([half], states.half(), context, memory.half())[0].output
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_renormalized_ends_in_half_precision():
    layer, states = build(offsets=(-8, 8), renormalize=True), vectors(1, 6)
    expected = by_equation(layer, states)[0]
    found = run_layers([layer.to(torch.float16)], states.half(), make_context(6))[0].output
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_no_queries_and_keys():
    layer = build()
    assert {name for name, _ in layer.named_parameters()} == {
        f"{part}_proj.{kind}" for part in "vo" for kind in ("weight", "bias")
    }


def test_norms_without_use_are_refused():
    """As cross-attention it reads places of the memory and nothing of its own input."""
    fields = {**GEOMETRY, "residual": "pre_ln", "is_encoder_decoder": True}
    with pytest.raises(ValueError, match="residual 'pre_ln' would have a norm without use"):
        XFormerConfig(**fields, cross_attention="hard_coded_gaussian")
    XFormerConfig(**fields, attention="hard_coded_gaussian")
