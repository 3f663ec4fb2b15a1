"""Conditional positional encoding against unfolded windows; what borders tell; padding, images, decoding."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def config(**fields):
    block = {"type": "cpe", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def generator(strong=0.5, **fields):
    made = config(**fields)
    torch.manual_seed(0)
    module = made.block.build(made, layer_idx=0).peg.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * strong)
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [3, 5])
def test_text_by_loop(causal, kernel):
    module, states = generator(block={"kernel": kernel}, is_decoder=causal), vectors(2, 7)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()
    found = module(states, make_context(7, causal, padding_mask=mask)).output
    begin = kernel - 1 if causal else kernel // 2
    for b in range(2):
        for t in range(7):
            expected = module.bias.clone()
            for n in range(kernel):
                place = t - begin + n
                if 0 <= place < 7 and mask[b, place]:
                    expected = expected + module.weight[:, 0, n] * states[b, place]
            close(found[b, t], expected)


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


def test_borders_tell_the_place():
    """Inside, a shift of the text shifts the output; within reach of the border it does not. With circular borders an
    encoder without other positions follows every roll of the image."""
    module, states = generator(), vectors(1, 9)
    found = module(states, make_context(9)).output
    shifted = module(states.roll(1, 1), make_context(9)).output
    close(shifted[:, 2:-1], found[:, 1:-2])
    assert (shifted[:, 1] - found[:, 0]).abs().max() > 1e-3
    torch.manual_seed(0)
    made = config(block={"grid_size": (3, 4), "border": "circular"})
    model = make_strong(XFormerModel(made).double().eval())
    ids = tokens(1, 12, high=50)
    rolled = ids.view(1, 3, 4).roll((1, 2), (1, 2)).view(1, 12)
    with torch.no_grad():
        expected = model(ids).last_hidden_state.view(1, 3, 4, 16).roll((1, 2), (1, 2)).view(1, 12, 16)
        close(model(rolled).last_hidden_state, expected)
        made = config(block={"grid_size": (3, 4)})
        model.trunk.layers[0].peg.circular = False
        assert (model(rolled).last_hidden_state - expected).abs().max() > 1e-4


def test_zero_kernel_is_identity():
    torch.manual_seed(0)
    model = make_strong(XFormerModel(config()).double().eval())
    plain = XFormerModel(config().__class__(**SIZES, position="none", residual="pre_ln")).double().eval()
    state = {name: x for name, x in model.state_dict().items() if "peg" not in name}
    plain.load_state_dict(state)
    ids = tokens(2, 7, high=50)
    with torch.no_grad():
        model.trunk.layers[0].peg.weight.zero_()
        model.trunk.layers[0].peg.bias.zero_()
        close(model(ids).last_hidden_state, plain(ids).last_hidden_state)


def test_which_layers():
    model = XFormerModel(config(block={"layers": (1,)}))
    assert [hasattr(layer, "peg") for layer in model.trunk.layers] == [False, True]


def test_refusals():
    with pytest.raises(ValueError, match="a grid of 2 x 3 tokens"):
        generator(block={"grid_size": (2, 3)})(vectors(1, 5), make_context(5))
    with pytest.raises(ValueError, match="packed documents.*block 'cpe' cannot keep apart"):
        XFormerModel(config())(torch.tensor([[5, 6, 7, 8]]), position_ids=torch.tensor([[0, 1, 0, 1]]))
