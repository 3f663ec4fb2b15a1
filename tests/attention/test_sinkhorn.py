"""Sparse Sinkhorn attention: its normalisation, texts beyond its table, one block, and its cache."""

import pytest
import torch
from transformers import StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention import sinkhorn_transformer
from hf_xformers.core.cache import make_cache, stateful_part
from hf_xformers.ops.sinkhorn import sinkhorn
from tests.attention.references.compressed import sinkhorn as by_equation
from tests.attention.score_helpers import (
    GEOMETRY,
    build_layers,
    make_context,
    run_layers,
    vectors,
)
from tests.helpers import close

SPEC = {"type": "sinkhorn_transformer", "block_size": 4}


def test_nearly_doubly_stochastic():
    scores = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    allowed = torch.ones(6, 6).bool()
    found = sinkhorn(scores, allowed, 50, False)
    for axis in (-1, -2):
        assert (found.sum(axis) - 1).abs().max() < 1e-3
    peaks = [sinkhorn(scores / heat, allowed, 200, False).amax(-1).mean() for heat in (1.0, 0.3, 0.1)]
    assert peaks[0] < peaks[1] < peaks[2] and peaks[2] > 0.85  # towards a hard permutation
    past = torch.ones(6, 6).bool().tril(-1)
    found, moved = (sinkhorn(s, past, 8, True) for s in (scores, scores + torch.arange(6)[:, None].gt(3) * scores))
    assert torch.equal(found[..., :4, :], moved[..., :4, :]) and not torch.equal(found, moved)
    assert not found.triu().any() and not found[..., 0, :].any()
    close(found[..., 1:, :].sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


def test_longer_than_its_table():
    """Padding may be, and says nothing; a text may not."""
    (layer,) = build_layers(SPEC, max_position_embeddings=8)
    states, mask = vectors(2, 15), torch.ones(2, 15).bool()
    mask[0, :7], mask[1, 5:] = False, False
    found = run_layers([layer], states, make_context(15, padding_mask=mask))[0].output.detach()
    for row, real in enumerate(mask):
        close(found[row, real], by_equation(layer, states[row : row + 1, real])[0].detach(), 1e-8)
    with pytest.raises(ValueError, match="has 15 tokens, but this sinkhorn_transformer sorts 2 blocks of 4; shorten"):
        run_layers([layer], states, make_context(15))


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_is_dense_attention(causal, monkeypatch):
    """Which a warning says, and nothing more than that: small models are allowed."""
    said = []
    monkeypatch.setattr(sinkhorn_transformer.logger, "warning_once", said.append)
    build_layers(SPEC, causal=causal, max_position_embeddings=5)
    assert not said
    (layer,) = build_layers(SPEC, causal=causal, max_position_embeddings=4)
    (dense,) = build_layers("dense", causal=causal, max_position_embeddings=4)
    assert "4 positions are one block of 4" in said[0]
    dense.load_state_dict(layer.state_dict(), strict=False)
    states, context = vectors(2, 4), make_context(4, causal)
    close(*(run_layers([each], states, context)[0].output for each in (layer, dense)), 1e-8)


def test_keeps_sums_beside_keys():
    """A cache that has no place for them is refused, not read wrongly."""
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention=SPEC)
    model = XFormerForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (1, 5))
    with pytest.raises(ValueError, match="running sums next to keys and values, which the given StaticCache"):
        model(ids, past_key_values=StaticCache(config=config, max_cache_len=8))
    assert stateful_part(config) == "attention 'sinkhorn_transformer'" and make_cache(config).is_croppable
