"""The Image Transformer: orders of generation, encoders of patches, and the mixture that it predicts."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.ops.common.token_grid import TokenGrid
from hf_xformers.variants.image_transformer import XFImageTransformerConfig, XFImageTransformerForCausalLM
from hf_xformers.variants.vision_transformer import XFVisionTransformerConfig, XFVisionTransformerModel
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong

PLANE = {"type": "image_transformer", "image_size": (4, 3), "num_channels": 2}  # 4 rows of 6 tokens, as many as 24
TWO = {**PLANE, "local": "2d", "block_shape": (2, 2), "memory_flange": (2, 2)}
GRID = TokenGrid(4, 6, (2, 2))


def cell(place):
    """Row and column of a place in the order of blocks, by walking through the plane."""
    walk = [(top + down, left + right) for top in (0, 2) for left in (0, 2, 4) for down in (0, 1) for right in (0, 1)]
    return walk[place]


def test_orders():
    """To the order of blocks and back; a cell's position is that of its row and column."""
    cells = torch.arange(24)[None]
    assert torch.equal(GRID.by_rows(GRID.ordered(cells)), cells)
    assert GRID.ordered(cells)[0].tolist() == [row * 6 + column for row, column in map(cell, range(24))]
    config = XFImageTransformerConfig(**GEOMETRY, attention=TWO)
    position = config.position.build(config).double()
    position.initialize(config, torch.nn.init)
    rows, columns = position.tables
    found = position.embed(torch.zeros(1, 24, 16, dtype=torch.float64), cells)[0]
    for place in range(24):
        row, column = cell(place)
        assert torch.equal(found[place], torch.cat([rows[row], columns[column]]))
    assert config.attention.token_grid(config) == GRID


def test_patches():
    """An encoder of patches goes through the plane row by row, and reads around blocks of them."""
    fields = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, add_pooler=False)
    spec = {"type": "image_transformer", "local": "2d", "block_shape": (2, 3), "memory_flange": (1, 2)}
    config = XFVisionTransformerConfig(
        **fields, image_size=(16, 36), patch_size=4, attention=spec, embedding={"type": "patch", "class_token": False}
    )
    model = make_strong(XFVisionTransformerModel(config).double().eval())
    mask = model.trunk.layers[0].attention.pattern.mask(36, 36)
    for i in range(36):
        for j in range(36):
            (row, column), (other, beside) = divmod(i, 9), divmod(j, 9)
            top, left = row // 2 * 2, column // 3 * 3
            assert bool(mask[i, j]) == (top - 1 <= other < top + 3 and left - 2 <= beside < left + 5)
    pixels = torch.randn(2, 3, 16, 36, dtype=torch.float64)
    with torch.no_grad():
        fast = model(pixels).last_hidden_state
        model.set_attn_implementation("eager")
        close(model(pixels).last_hidden_state, fast)


def test_defaults():
    config = XFImageTransformerConfig(attention={"type": "image_transformer", "local": "2d"})
    spec = config.attention
    assert spec.plane(config) == (32, 96) and spec.block_of(config) == (16, 16) and spec.flange_of(config) == (16, 32)
    assert config.position.grid(config) == (32, 96)


# ------------------------------------------------------------------------------------------------ outputs


def mixture(levels=7, mixtures=3):
    torch.manual_seed(0)
    head = {"type": "logistic_mixture", "num_mixtures": mixtures, "levels": levels}
    config = XFormerConfig(**GEOMETRY, head=head, tie_word_embeddings=False)
    return make_strong(config.head.build(config).double(), amount=1.0)


@torch.no_grad()
def test_mixture_of_logistics():
    """Differences of the distribution function, written with exponentials; all of them sum to one."""
    head, states = mixture(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = head(states).exp()
    close(found.sum(-1), torch.ones(5, dtype=torch.float64))
    for row, state in enumerate(states):
        weights, means, scales = head.mixture(state).chunk(3)
        shares = weights.exp() / weights.exp().sum()
        for level in range(7):
            total = 0.0
            for k in range(3):
                ends = []
                for edge in (level + 0.5, level - 0.5):
                    x = (2 * edge / 6 - 1 - means[k].item()) / math.exp(scales[k].item())
                    ends.append(1 / (1 + math.exp(min(-x, 700.0))) if 0 < edge < 6 else float(edge > 0))
                total += shares[k].item() * (ends[0] - ends[1])
            assert abs(total - found[row, level].item()) < 1e-12


def test_mixture_stays_finite():
    """Narrow and far distributions, in every precision, with gradients."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        config = XFormerConfig(**{**GEOMETRY, "vocab_size": 256}, head="logistic_mixture", tie_word_embeddings=False)
        head = make_strong(config.head.build(config), amount=2.0).to(dtype)
        states = (100 * torch.randn(4, 16)).to(dtype).requires_grad_()
        output = head(states)
        assert output.shape == (4, 256) and output.isfinite().all()
        output.float().logsumexp(-1).sum().backward()
        assert states.grad.isfinite().all() and head.mixture.weight.grad.isfinite().all()


def test_refused_outputs():
    with pytest.raises(ValueError, match="does not predict tokens one by one"):
        config = XFImageTransformerConfig(**GEOMETRY, head="logistic_mixture", tie_word_embeddings=False)
        XFImageTransformerForCausalLM(config).resize_token_embeddings(60)
