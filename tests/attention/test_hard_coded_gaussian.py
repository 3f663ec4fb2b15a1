"""Hard-coded Gaussian attention over texts of several blocks, and beyond the end of a memory."""

import pytest
import torch

from hf_xformers.attention.hard_coded_gaussian import BLOCK
from tests.attention.references.softmax import hard_coded_gaussian as by_equation
from tests.attention.score_helpers import build_layers, make_context, run_layers, vectors
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
