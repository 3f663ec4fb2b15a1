"""Plain patterns as attention components, against their sets of keys written as loops."""

import copy

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.cache import make_cache
from hf_xformers.core.components import build_spec
from tests.attention.references.patterns import drawn_blocks
from tests.attention.score_helpers import GEOMETRY, build_layers
from tests.helpers import close, make_strong, tokens

BAND = {"type": "band_attention", "window_size": 3}
GLOBAL = {"type": "global_attention", "window_size": 2, "num_global_tokens": 2}
DILATED = {"type": "dilated_attention", "window_size": 2, "dilation": 3}
GAPS = {"type": "dilated_attention", "window_size": 2, "dilation": (1, (1, 1, 2, 4), 2)}
RANDOM = {"type": "random_attention", "block_size": 2, "num_random_blocks": 2, "random_seed": 3}
NEAR = {"type": "block_local_attention", "block_size": 3, "blocks_before": 1}

# By name: spec, the keys j that token i reads (head, number of tokens) in an encoder, and in a decoder beside j <= i.
BY_LAYER = [RANDOM, BAND, GLOBAL, DILATED, NEAR]


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks(causal):
    """The drawn blocks, read from the pattern's own table, and what is promised about them."""
    first, second = build_layers(RANDOM, 2, causal)
    drawn = {}

    for number, layer in enumerate((first, second)):
        for count in (5, 9, 12):  # texts of every length have as many
            drawn[number] = drawn_blocks(layer, count)
            for table in drawn[number]:
                for row, blocks in enumerate(table):
                    real = [block for block in blocks if block >= 0]
                    assert len(set(real)) == len(real) == min(2, row if causal else count - 1)
                    assert all(block < row if causal else block != row and 0 <= block < count for block in real)
    assert drawn[0] != drawn[1] and drawn[0][0] != drawn[0][1]  # anew in every layer and head
    again = build_layers(RANDOM, 1, causal)[0]
    assert again.pattern == first.pattern and copy.deepcopy(first).pattern == first.pattern
    other = build_layers({**RANDOM, "random_seed": 4}, 1, causal)[0]
    assert other.pattern != first.pattern


def test_one_layer_or_one_head_decides_its_own():
    config = XFormerConfig(**GEOMETRY, attention=GAPS)
    patterns = [config.attention.build(config, layer_idx=layer).pattern for layer in range(3)]
    assert len(set(patterns)) == 3
    assert build_layers({"type": "dilated_attention", "dilation": 1, "window_size": 3})[0].pattern == (
        build_layers(BAND)[0].pattern
    )


def test_decoding_past_the_window():
    """Token by token far beyond the window equals one pass, left padding included."""
    for spec in BY_LAYER:
        torch.manual_seed(0)
        model = XFormerForCausalLM(XFormerConfig(**GEOMETRY, attention=spec)).double().eval()
        make_strong(model, amount=0.3)
        ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
        mask[1, :3] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            cache, found, begin = make_cache(model.config), [], 0
            for count in (5, 1, 1, 7, 1, 1, 1, 1, 1, 1):
                end = begin + count
                given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
                found.append(model(ids[:, begin:end], **given).logits)
                begin = end
        close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
        kept = [layer.keys.shape[2] for layer in cache.layers]
        assert kept == [{"band_attention": 2, "dilated_attention": 3}.get(spec["type"], 20)] * 3


def test_saved_specs_come_back():
    for spec in (BAND, GAPS, RANDOM):
        built = build_spec("attention", spec)
        assert build_spec("attention", built.to_dict()) == built
