"""Attention over chosen blocks: the engine under any lists of blocks, and what is kept for gradients."""

import pytest
import torch

from hf_xformers.ops import chosen_blocks
from hf_xformers.ops.chosen_blocks import Places, best_blocks, chosen_block_attention, chosen_block_mask
from tests.attention.score_helpers import HEADS, build_layers, make_context, run_layers, saved_sizes, vectors
from tests.helpers import close

NSA = "native_sparse_attention"


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_engine(few, causal, monkeypatch):
    """Any lists of blocks, some of them short or empty, padding on either side and rows of padding alone: outputs and
    gradients as under the mask."""
    monkeypatch.setattr(chosen_blocks, "FEW_QUERIES", 99 if few else 0)
    monkeypatch.setattr(chosen_blocks, "TILE_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 19, dtype=torch.bool)
    mask[1, 12:], mask[2, :5], mask[3] = False, False, False
    query, key, value = (
        torch.randn(4, 2, length, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for length in (7, 19, 19)
    )
    places = Places.of(torch.arange(12, 19), torch.arange(19), mask)
    scores = torch.randn(4, 2, 7, 5, generator=generator)
    choices = best_blocks(scores, torch.rand(4, 1, 7, 5, generator=generator) < 0.6, 3)
    inputs = places.in_order(key), places.in_order(value)
    found = chosen_block_attention(query, *inputs, choices, places, 4, causal, 0.7)
    allowed = chosen_block_mask(choices, places, 4, causal)
    powers = torch.exp(0.7 * query @ key.mT) * allowed
    expected = powers @ value / powers.sum(-1, keepdim=True).clamp(min=1e-300)
    assert (choices == -1).any() and (~allowed.any(-1)).any()
    close(found, expected)
    probe = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad((x * probe).sum(), (query, key, value)) for x in (found, expected))):
        close(one, other)


@pytest.mark.parametrize("spec", [{"type": "moba"}, {"type": NSA, "window_size": 8}], ids=lambda spec: spec["type"])
def test_what_is_kept_grows_with_the_text(spec):
    layer = build_layers({**spec, "block_size": 16, "num_blocks": 3}, 1, True, max_position_embeddings=1024)[0].train()
    layer.dropout = 0.0
    sums = []
    for length in (256, 512):
        sizes = saved_sizes(lambda length=length: run_layers([layer], vectors(1, length), make_context(length, True)))
        assert sizes[0] <= 4 * length * 16 * HEADS
        sums.append(sum(sizes))
    assert sums[1] < 2.3 * sums[0]
