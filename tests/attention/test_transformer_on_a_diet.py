"""Transformer on a Diet: its sets of keys as loops over the paper's definition, layer by layer."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.block_sparse.attention import block_sparse_attention, block_sparse_reference
from hf_xformers.ops.block_sparse.patterns import dilated
from hf_xformers.variants.transformer_on_a_diet import XFTransformerOnADietConfig, XFTransformerOnADietForCausalLM
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong, tokens


def spec(**fields):
    return {"type": "transformer_on_a_diet", **fields}


def test_caches_keep_what_a_layer_reads():
    for kind, kept in (
        ("cascade", [3, 7, 15]),
        ("dilated", [2, 4, 8]),
        ("dilated_mem", [2, 4, 8]),
        ("full", [20] * 3),
    ):
        torch.manual_seed(0)
        config = XFTransformerOnADietConfig(
            **GEOMETRY, bos_token_id=1, eos_token_id=2, is_decoder=True, attention=spec(diet_type=kind)
        )
        model = make_strong(XFTransformerOnADietForCausalLM(config).double().eval(), amount=0.3)
        ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
        mask[1, :3] = 0
        cache, found = make_cache(config), []
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            for begin, end in [(0, 9), *((at, at + 1) for at in range(9, 20))]:
                given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
                found.append(model(ids[:, begin:end], **given).logits)
        close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
        assert [layer.keys.shape[2] for layer in cache.layers] == kept


@pytest.mark.parametrize("gap", [3, 40, 70, 2**39])
def test_gaps_near_and_beyond_the_text(gap):
    """Classes of tokens are as many as the text has, however large the gap is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 80, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for lengths in ((80, 0), (7, 73)):
        queries, offset = lengths
        found = block_sparse_attention(q[:, :, :queries], k, v, dilated(30, 0, gap), query_offset=offset)
        expected = block_sparse_reference(q[:, :, :queries], k, v, dilated(30, 0, gap), query_offset=offset)[0]
        close(found, expected)


def test_deep_models_are_built():
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": 70}, attention=spec(diet_type="dilated"))
    assert config.attention.pattern(config, 69).allows(torch.tensor(5), torch.arange(9)).nonzero().item() == 5
