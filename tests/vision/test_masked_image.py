"""Masked image modelling: the loss by hand, and what may decide."""

import itertools

import pytest
import torch

from hf_xformers import XFVisionTransformerConfig, XFVisionTransformerForMaskedImageModeling
from tests.helpers import NO_DROPOUT, close, make_strong

SIZES = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    **NO_DROPOUT,
}


def build(**changes):
    torch.manual_seed(0)
    return XFVisionTransformerForMaskedImageModeling(XFVisionTransformerConfig(**{**SIZES, **changes}))


def test_the_loss_is_the_error_of_hidden_pixels():
    model = make_strong(build(image_size=[4, 6], num_channels=2).double().eval())
    images = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]])
    output = model(images, bool_masked_pos=mask)
    states = model.model(images, hidden_patches=(mask.bool(), model.decoder.mask_token)).last_hidden_state[:, 1:]
    total = count = 0.0
    for row, patch in itertools.product(range(2), range(6)):
        place = (
            row,
            slice(None),
            slice(2 * (patch // 3), 2 * (patch // 3) + 2),
            slice(2 * (patch % 3), 2 * (patch % 3) + 2),
        )
        made = model.decoder.pixels(states[row, patch]).view(2, 2, 2)
        close(output.reconstruction[place], made)
        if mask[row, patch]:
            total, count = total + (made - images[place]).abs().sum(), count + made.numel()
    close(output.loss, total / count)
    assert model(images).loss is None
    assert model(images, bool_masked_pos=torch.zeros_like(mask)).loss == 0


@torch.no_grad()
def test_hidden_pixels_decide_nothing():
    model = make_strong(build().double().eval())
    images, mask = torch.randn(1, 1, 8, 8, dtype=torch.float64), torch.zeros(1, 16).long()
    mask[0, 5] = 1  # pixels 2, 3 of rows 2, 3
    changed, seen = images.clone(), images.clone()
    changed[..., 2:4, 2:4] += 1
    seen[..., 0, 0] += 1
    before = model(images, bool_masked_pos=mask).reconstruction
    close(model(changed, bool_masked_pos=mask).reconstruction, before)
    assert (model(seen, bool_masked_pos=mask).reconstruction - before).abs().max() > 1e-3
    assert (model(changed).reconstruction - model(images).reconstruction).abs().max() > 1e-3


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"`bool_masked_pos` must be \[batch, patches\] = \[1, 16\], got \[1, 4\]"):
        build()(torch.zeros(1, 1, 8, 8), bool_masked_pos=torch.ones(1, 4))


def test_squares_are_patches():
    """By the field that transformers' `run_mim.py` reads and sets."""
    config = XFVisionTransformerConfig(**SIZES)
    assert config.encoder_stride == 2
    config.update({"image_size": 8, "patch_size": 4, "encoder_stride": 4})
    assert config.grid == (2, 2) and "encoder_stride" not in config.to_dict()
    with pytest.raises(ValueError, match="`encoder_stride` is 8"):
        config.update({"encoder_stride": 8})
