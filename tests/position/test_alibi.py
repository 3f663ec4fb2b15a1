"""ALiBi: slopes as the paper prints them and as BLOOM has them, and whole models against attention written out."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.position.alibi import slope_exponents
from tests.helpers import close, make_strong, tokens

SIZES = dict(
    vocab_size=60,
    hidden_size=18,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=24,
    residual="pre_ln",
    position="alibi",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


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


def by_hand(model, ids, causal):
    """The whole model in float64, attention written out."""
    trunk = model.trunk
    x = trunk.embedding.tokens(ids)
    order = torch.arange(ids.shape[1])
    distance = (order[:, None] - order[None]).abs()
    bias = torch.stack([-slope * distance for slope in slopes(3)]).double()
    if causal:
        bias = bias.masked_fill(order[None] > order[:, None], float("-inf"))
    for layer in trunk.layers:
        attention, n = layer.attention, layer.attention_residual.norm(x)
        q, k, v = (
            p(n).unflatten(-1, (3, 6)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        weights = torch.softmax(q @ k.mT / 6**0.5 + bias, dim=-1)
        x = x + attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
        n, feedforward = layer.feedforward_residual.norm(x), layer.feedforward
        x = x + feedforward.down_proj(torch.nn.functional.gelu(feedforward.up_proj(n)))
    return trunk.final_norm(x)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_model_by_hand(causal, implementation):
    torch.manual_seed(0)
    model = make_strong(XFormerModel(XFormerConfig(**SIZES, is_decoder=causal)).double().eval())
    model.set_attn_implementation(implementation)
    ids = tokens(2, 13, high=60)
    close(model(ids).last_hidden_state, by_hand(model, ids, causal))


def test_nothing_is_saved(tmp_path):
    model = XFormerForCausalLM(XFormerConfig(**SIZES))
    assert not [name for name in model.state_dict() if "position" in name]
    model.save_pretrained(tmp_path)
    again = XFormerForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert again.model.trunk.position.exponents.dtype == torch.bfloat16
    assert again.model.trunk.position.exponents.tolist() == slope_exponents(3)
