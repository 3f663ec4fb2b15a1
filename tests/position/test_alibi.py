"""ALiBi: slopes as the paper prints them and as BLOOM has them, and its bias."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.position.alibi import slope_exponents
from tests.helpers import close


def slopes(heads):
    return [2.0**-exponent for exponent in slope_exponents(heads)]


def bias_of(heads):
    config = XFormerConfig(hidden_size=4 * heads, num_attention_heads=heads, position="alibi")
    return config.position.build(config)


def test_slopes_of_the_paper():
    """Section 3: 1/2, 1/4, ..., 1/256 for 8 heads; for 16 the geometric sequence from 2^-0.5 on."""
    assert slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    found = slopes(16)
    assert found[0] == pytest.approx(2**-0.5) and found[-1] == 2**-8
    assert all(after / before == pytest.approx(2**-0.5) for before, after in itertools.pairwise(found))
    assert slopes(1) == [2**-8] and slopes(2) == [2**-4, 2**-8]


@pytest.mark.parametrize("heads", [1, 3, 5, 6, 7, 12, 20, 24, 112])
def test_slopes_of_bloom(heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    close(torch.tensor(slopes(heads)), _get_alibi_slopes(heads, torch.device("cpu")), 1e-6)


def test_block_by_a_loop():
    module, queries, keys = bias_of(3), torch.tensor([4, 9]), torch.tensor([0, 4, 11])
    found = module.block(queries, keys)
    for h, slope in enumerate(slopes(3)):
        for i, query in enumerate(queries.tolist()):
            for j, key in enumerate(keys.tolist()):
                assert float(found[h, i, j]) == pytest.approx(-slope * abs(query - key), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    """Products are made in float32: in half precision neither a distance of 1001 nor 2^-0.5 could be written."""
    module, distance = bias_of(16), torch.arange(1, 1002)
    found = module.to(dtype).by_distance(distance)
    expected = torch.tensor([[-slope * d for d in distance.tolist()] for slope in slopes(16)])
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
