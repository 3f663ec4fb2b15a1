"""A bias made block by block against the whole matrix."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.attention import dense
from hf_xformers.attention.shared import query_blocks
from hf_xformers.ops.block_sparse import attention as block_sparse
from hf_xformers.ops.block_sparse import flex
from hf_xformers.ops.score_terms.attention import blocks_of_tiles
from hf_xformers.ops.score_terms.terms import Blocks
from hf_xformers.position import score_terms

LENGTH = 23


def model_of(causal: bool, key_value_heads: int | None = None, dropout: float = 0.0) -> XFormerModel:
    torch.manual_seed(0)
    config = XFormerConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        intermediate_size=32,
        position={"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 16},
        initializer_range=0.5,
        attention_probs_dropout_prob=dropout,
        is_decoder=causal,
    )
    return XFormerModel(config).double().eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_value_heads", [None, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_equal_the_whole(monkeypatch, causal, key_value_heads, padded):
    model = model_of(causal, key_value_heads)
    ids = torch.randint(1, 30, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padded:
        mask[0, :5], mask[1, 17:] = 0, 0
    weights = torch.randn(2, LENGTH, 16, dtype=torch.float64) * mask[..., None]

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (output * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return output.detach() * mask[..., None], gradients

    expected, whole = run()
    blocks = []
    line = score_terms.BiasByDistance.line
    monkeypatch.setattr(score_terms.BiasByDistance, "line", lambda *a: blocks.append(1) or line(*a))
    monkeypatch.setattr(dense, "TRAINED_BIAS_AT_ONCE", 1)
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 2 * LENGTH * 8)
    monkeypatch.setattr(query_blocks, "LEAST_ROWS", 4)
    monkeypatch.setattr(query_blocks, "FAVOURED_ROWS", 4)
    found, parts = run()
    assert blocks
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_equals_the_whole(monkeypatch, causal, padded):
    """The kernel of an accelerator, here its uncompiled form, gets the bias as a line of numbers by distance."""
    model, calls = model_of(causal, key_value_heads=2), []
    ids, mask = torch.randint(1, 30, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, : 5 * padded] = 0
    real = mask.bool()

    def run() -> list[torch.Tensor]:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[real]
        return [output, *torch.autograd.grad(output.sin().sum(), list(model.parameters()), allow_unused=True)]

    def uncompiled(*arguments, **options):
        calls.append(options["bias"])
        return flex.flex_block_sparse(*arguments, **options, compiled=False)

    expected = run()
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    for module in (dense, block_sparse):
        monkeypatch.setattr(module, "flex_applies", lambda *tensors: True)
    monkeypatch.setattr(block_sparse, "flex_block_sparse", uncompiled)
    monkeypatch.setattr(dense, "TRAINED_BIAS_AT_ONCE", 1)
    found = run()
    assert len(calls) == 2 and all(calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # it computes in float32


def test_the_whole_is_made_where_tiles_do_not_pay(monkeypatch):
    """Tiles are for the gradient of the bias; without one, or with dropout, torch's kernels take the whole bias for
    longer."""
    monkeypatch.setattr(dense, "TRAINED_BIAS_AT_ONCE", 1)
    blocks = []
    line = score_terms.BiasByDistance.line
    monkeypatch.setattr(score_terms.BiasByDistance, "line", lambda *a: blocks.append(1) or line(*a))
    ids = torch.randint(1, 30, (2, LENGTH))
    with torch.no_grad():
        model_of(False)(input_ids=ids)
    model_of(False, dropout=0.1).train()(input_ids=ids)
    assert not blocks
    monkeypatch.setattr(dense, "BIAS_AT_ONCE", 1)
    with torch.no_grad():
        model_of(False)(input_ids=ids)
    assert blocks


def test_bias_alone_has_blocks_as_high_as_tiles():
    """One sample of 4096 tokens: 512 queries and 256 keys; many samples share a tile; short texts take heads
    together."""
    assert blocks_of_tiles(1, 8, 4096) == Blocks(1, 512)
    assert blocks_of_tiles(64, 8, 512) == Blocks(1, 128)
    assert blocks_of_tiles(1, 8, 128) == Blocks(4, 512)
