"""Axial positions: the grid, its widths, its start."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from tests.helpers import close, make_strong

GEOMETRY = dict(
    vocab_size=40,
    hidden_size=16,
    num_attention_heads=2,
    num_hidden_layers=1,
    intermediate_size=16,
    max_position_embeddings=24,
)
GRID = {"type": "axial", "shape": (2, 3, 4)}


def build(**fields):
    torch.manual_seed(0)
    return make_strong(XFormerModel(XFormerConfig(**GEOMETRY, position={**GRID, **fields})).double().eval())


@pytest.mark.parametrize("fields", [{"widths": (3, 8, 5)}, {}, {"combine": "sum"}], ids=str)
def test_every_place_by_hand(fields):
    position = build(**fields).trunk.position
    first, second, third = position.tables
    found = position.embed(torch.zeros(1, 24, 16, dtype=torch.float64), torch.arange(24)[None])[0]
    place = 0
    for i in range(2):
        for j in range(3):
            for k in range(4):
                parts = first[i], second[j], third[k]
                close(found[place], sum(parts) if fields.get("combine") == "sum" else torch.cat(parts))
                place += 1


def test_a_grid_by_default():
    config = XFormerConfig(**{**GEOMETRY, "max_position_embeddings": 30}, position="axial")
    assert config.position.grid(config) == (5, 6)
    assert config.position.axis_widths(config) == (8, 8)
    assert config.position.max_length(config) == 30


def test_start():
    torch.manual_seed(0)
    config = XFormerConfig(**{**GEOMETRY, "max_position_embeddings": 900}, position={"type": "axial", "std": 0.5})
    for table in XFormerModel(config).trunk.position.tables:
        assert table.std().item() == pytest.approx(0.5, rel=0.15)
