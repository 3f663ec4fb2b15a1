"""The patch embedding and the pooling, by hand. (tests/conversion compares the model with transformers' own.)"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_xformers import XFormerConfig
from hf_xformers.variants.vision_transformer import (
    XFVisionTransformerConfig,
    XFVisionTransformerForImageClassification,
    XFVisionTransformerModel,
)
from tests.helpers import close, make_strong

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}


def build(cls=XFVisionTransformerModel, **more):
    torch.manual_seed(0)
    return make_strong(cls(XFVisionTransformerConfig(**{**SIZES, **more})).double().eval())


def picture(*size, count=2, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, *size, generator=generator, dtype=torch.float64)


def unfolded(net, pixels):
    """Every patch cut out, flattened channel first, times the weights as a matrix: [B, N, D]."""
    embedding = net.trunk.embedding
    tall, wide = embedding.patch
    matrix, rows = embedding.tokens.weight.flatten(1), []
    for top in range(0, pixels.shape[2], tall):
        for left in range(0, pixels.shape[3], wide):
            rows.append(
                pixels[:, :, top : top + tall, left : left + wide].flatten(1) @ matrix.T + embedding.tokens.bias
            )
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("more", [{}, {"image_size": [8, 12], "patch_size": (2, 4), "num_channels": 1}])
def test_patches(more):
    """The convolution is a linear map of each patch, rows first; class token and positions around it."""
    net = build(**more)
    pixels = picture(*net.config.image_shape, channels=net.config.num_channels)
    embedding = net.trunk.embedding
    expected = unfolded(net, pixels)
    expected = torch.cat([embedding.class_token.expand(2, 1, -1), expected], dim=1) + embedding.positions
    with torch.no_grad():
        close(embedding.patches(pixels), expected)
        first = net(pixels, output_hidden_states=True).hidden_states[0]
    close(first, expected.detach())
    rows, columns = net.config.grid
    assert embedding.positions.shape == (rows * columns + 1, 16)


def test_distillation_token():
    """It stands between the class token and the patches, has a position of its own, which no resizing changes, and is
    no patch of the mean."""
    net = build(XFVisionTransformerForImageClassification, embedding={"type": "patch", "distillation_token": True})
    pixels, embedding = picture(12, 12), net.model.trunk.embedding
    leading = torch.stack([embedding.class_token, embedding.distillation_token]).expand(2, 2, -1)
    assert embedding.positions.shape == (11, 16)
    with torch.no_grad():
        close(
            embedding.patches(pixels), torch.cat([leading, unfolded(net.model, pixels)], dim=1) + embedding.positions
        )
        assert torch.equal(embedding.grid_positions(2, 5)[:2], embedding.positions[:2])
        states = net.model(pixels).last_hidden_state
        close(net.pooled(states), states[:, 0])
        net.config.classifier_pooling = "mean"
        close(net.pooled(states), states[:, 2:].mean(1))
    with pytest.raises(ValueError, match="next to a class token alone"):
        build(embedding={"type": "patch", "class_token": False, "distillation_token": True})


def test_positions_tell_patches_apart():
    """Without positions, the class token does not see the order of the patches; with them it does."""
    pixels = picture(12, 12)
    blocks = pixels.unfold(2, 4, 4).unfold(3, 4, 4)
    mixed = blocks[:, :, [2, 0, 1]].permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 12, 12)
    for positions in (True, False):
        net = build(embedding={"type": "patch", "positions": positions})
        with torch.no_grad():
            one, two = (net(given).last_hidden_state[:, 0] for given in (pixels, mixed))
        assert torch.allclose(one, two, atol=1e-10) != positions


def cubic(x, a=-0.75):
    """Keys' kernel, the bicubic weight of a point at distance x."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def test_resized_positions():
    """Bicubic weights of the 16 cells around each new cell's centre, edges repeated; the class row stays; at the
    native size nothing happens."""
    net = build()
    embedding, (rows, columns) = net.trunk.embedding, (5, 2)
    assert embedding.grid_positions(3, 3) is embedding.positions
    table = embedding.positions.detach()[1:].view(3, 3, -1)
    expected = torch.zeros(rows, columns, 16, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            y, x = (row + 0.5) * 3 / rows - 0.5, (column + 0.5) * 3 / columns - 0.5
            for i in range(int(y // 1) - 1, int(y // 1) + 3):
                for j in range(int(x // 1) - 1, int(x // 1) + 3):
                    cell = table[min(max(i, 0), 2), min(max(j, 0), 2)]
                    expected[row, column] += cubic(y - i) * cubic(x - j) * cell
    with torch.no_grad():
        found = embedding.grid_positions(rows, columns)
        assert torch.equal(found[0], embedding.positions[0])
        close(found[1:], expected.flatten(0, 1))
        output = net(picture(20, 8), interpolate_pos_encoding=True).last_hidden_state
    assert output.shape == (2, 11, 16)


def test_refusals():
    net = build()
    with pytest.raises(ValueError, match="20 x 8 pixels, but positions are for 12 x 12"):
        net(picture(20, 8))
    with pytest.raises(ValueError, match="do not fill an image of 18 x 8"):
        net(picture(18, 8), interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match="3 channels"):
        net(picture(12, 12, channels=1))
    with pytest.raises(ValueError, match="Give `pixel_values`"):
        net()
    with pytest.raises(ValueError, match="give `pixel_values` instead of `input_ids`"):
        net.trunk(input_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="is not a multiple of `patch_size`"):
        build(image_size=13)
    with pytest.raises(ValueError, match=r"`image_size` is a number of pixels or \(height, width\)"):
        build(image_size=[12, 12, 12])
    with pytest.raises(ValueError, match="use a config of images"):
        XFormerConfig(embedding="patch")
    with pytest.raises(ValueError, match="is an encoder's"):
        build(is_decoder=True)


def test_pooling():
    """Class token or mean of the patches, without the class token."""
    pixels = picture(12, 12)
    for pooling, token in (("auto", True), ("first", True), ("mean", True), ("auto", False)):
        net = build(
            XFVisionTransformerForImageClassification,
            classifier_pooling=pooling,
            embedding={"type": "patch", "class_token": token},
            num_labels=4,
        )
        with torch.no_grad():
            states = net.model(pixels).last_hidden_state
            vector = states[:, 0] if pooling != "mean" and token else states[:, -9:].mean(1)
            close(net(pixels).logits, F.linear(vector, net.classifier.weight, net.classifier.bias))
