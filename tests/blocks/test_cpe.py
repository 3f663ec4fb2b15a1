"""Conditional positional encoding against unfolded windows, of texts and of images."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from tests.attention.score_helpers import make_context, vectors
from tests.blocks.test_evolved_transformer import convolved
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def config(**fields):
    block = {"type": "cpe", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def generator(**fields):
    made = config(**fields)
    return randomized(made.block.build(made, layer_idx=0).peg, 0.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [3, 5])
def test_text_by_loop(causal, kernel):
    module, states = generator(block={"kernel": kernel}, is_decoder=causal), vectors(2, 7)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()
    found = module(states, make_context(7, causal, padding_mask=mask)).output
    before = kernel - 1 if causal else kernel // 2
    for b in range(2):
        close(found[b], convolved(states[b], module.weight, mask[b], before, module.bias))


def test_image_by_loop():
    """A class token passes by; tokens stand row by row."""
    module, states = generator(block={"grid_size": (2, 3)}), vectors(2, 7)
    found = module(states, make_context(7)).output
    assert (found[:, 0] == 0).all()
    grid = states[:, 1:].view(2, 2, 3, 16)
    for row in range(2):
        for column in range(3):
            expected = module.bias.expand(2, -1)
            for i in range(3):
                for j in range(3):
                    y, x = row + i - 1, column + j - 1
                    if 0 <= y < 2 and 0 <= x < 3:
                        expected = expected + module.weight[:, 0, i, j] * grid[:, y, x]
            close(found[:, 1 + row * 3 + column], expected)


def test_which_layers():
    model = XFormerModel(config(block={"layers": (1,)}))
    assert [hasattr(layer, "peg") for layer in model.trunk.layers] == [False, True]


def test_refusals():
    with pytest.raises(ValueError, match="a grid of 2 x 3 tokens"):
        generator(block={"grid_size": (2, 3)})(vectors(1, 5), make_context(5))
    with pytest.raises(ValueError, match="packed documents.*block 'cpe' cannot keep apart"):
        XFormerModel(config())(torch.tensor([[5, 6, 7, 8]]), position_ids=torch.tensor([[0, 1, 0, 1]]))
