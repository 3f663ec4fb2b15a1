"""Attention over chosen blocks: the engine under any lists of blocks, and what is kept for gradients."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention import moba
from hf_xformers.ops import chosen_blocks, pooled_blocks
from hf_xformers.ops.chosen_blocks import Places, best_blocks, chosen_block_attention, chosen_block_mask
from tests.attention.score_helpers import GEOMETRY, HEADS, build_layers, make_context, run_layers, saved_sizes, vectors
from tests.helpers import close, make_strong, pad, tokens

NSA = "native_sparse_attention"
BOTH = [{"type": "moba"}, {"type": NSA, "window_size": 8}]
each_mechanism = pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec["type"])


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


@each_mechanism
def test_what_is_kept_grows_with_the_text(spec):
    layer = build_layers({**spec, "block_size": 16, "num_blocks": 3}, 1, True, max_position_embeddings=1024)[0].train()
    layer.dropout = 0.0
    sums = []
    for length in (256, 512):
        sizes = saved_sizes(lambda length=length: run_layers([layer], vectors(1, length), make_context(length, True)))
        assert sizes[0] <= 4 * length * 16 * HEADS
        sums.append(sum(sizes))
    assert sums[1] < 2.3 * sums[0]


def small_blocks(spec):
    torch.manual_seed(0)
    config = XFormerConfig(
        **GEOMETRY,
        is_decoder=True,
        num_key_value_heads=2,
        attention={**spec, "block_size": 4, "num_blocks": 3},
        position="rotary",
    )
    return make_strong(XFormerForCausalLM(config).double().eval(), amount=0.3)


@each_mechanism
@torch.no_grad()
def test_kept_means(spec, monkeypatch):
    """Texts of 40 and 33 tokens in pieces, some of which are taken back, and their rows repeated and in another order:
    as without a cache. For means a call reads the blocks that its own tokens reach, and no others."""
    model, read = small_blocks(spec), []
    means = pooled_blocks.pooled_blocks

    def seen(x, *args):
        read.append(x.shape[-2])
        return means(x, *args)

    for module in (pooled_blocks, moba):
        monkeypatch.setattr(module, "pooled_blocks", seen)
    ids, mask = pad([tokens(40, high=50), tokens(33, seed=1, high=50)], 40, "left")
    full, cache = model(ids, attention_mask=mask, use_cache=False).logits, None
    pieces = (0, 1, 1), (1, 15, 20), (15, 16, 4), (16, 27, 16), (27, 28, 4), (6, 7, 4), (7, 18, 16), (13, 34, 24)
    for begin, end, most in (*pieces, (34, 35, 4)):
        if cache is not None and cache.get_seq_length() > begin:
            cache.crop(begin - cache.get_seq_length())
        read.clear()
        found = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache, real = found.past_key_values, mask[:, begin:end].bool()
        close(found.logits[real], full[:, begin:end][real])
        assert read and max(read) == most
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    last = {"attention_mask": mask.flip(0), "past_key_values": cache}
    close(model(ids.flip(0)[:, 35:], **last).logits, full.flip(0)[:, 35:])
    cache.reset()
    assert not any(layer.made for layer in cache.layers)
    again = model(ids.flip(0), **last).logits
    close(again[mask.flip(0).bool()], full.flip(0)[mask.flip(0).bool()])


@each_mechanism
@torch.no_grad()
def test_kept_means_behind_padding(spec):
    """A prompt padded on the right, whose row is continued."""
    model, texts = small_blocks(spec), [tokens(22, high=50), tokens(13, seed=1, high=50)]
    ids, mask = pad(texts, 22, "right")
    more = tokens(2, 3, seed=2, high=50)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert all(layer.known == 22 for layer in cache.layers)
    for place in range(3):
        mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
        found = model(more[:, place : place + 1], attention_mask=mask, past_key_values=cache).logits
        for row, text in enumerate(texts):
            whole = torch.cat((text.flatten(), more[row, : place + 1]))[None]
            close(found[row], model(whole, use_cache=False).logits[0, -1:])
