"""Forget gates where they are strong, beside other attentions, and in caches of any precision."""

import pytest
import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, QuantizedCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.compat import CACHE
from hf_xformers.core.cache import appended_with_numbers, make_cache
from tests.attention.score_helpers import GEOMETRY, HEADS, build_layers, make_context, run_layers, saved_sizes, vectors
from tests.helpers import close, make_strong, tokens

GATES = {"position": "forget_gate"}


@pytest.mark.parametrize("strength", [0.1, 5.0, 30.0])
@torch.no_grad()
def test_float32_has_its_digits(strength):
    """A sum that has grown to thousands takes nothing from what near tokens have to say."""
    (layer,) = build_layers("dense", 1, True, **GATES)
    layer.position_terms.forget_proj.bias.fill_(-strength)
    layer.position_terms.forget_proj.weight.mul_(30.0)  # some gates are open, most are not
    states, context = vectors(1, 600).float(), make_context(600, True)
    gates = F.logsigmoid(layer.position_terms.forget_proj(states.double()))[0].T
    assert gates.sum(-1).min() < -3 * strength * 10
    expected = run_layers([layer], states.double(), context)[0].output
    found = run_layers([layer.float()], states, make_context(600, True))[0].output
    close(found.double(), expected, 2e-5)


def test_nothing_of_all_pairs_is_kept():
    (layer,) = build_layers("dense", 1, True, **GATES, max_position_embeddings=600)
    sizes = saved_sizes(lambda: run_layers([layer], vectors(1, 600).requires_grad_(), make_context(600, True)))
    assert sizes[0] <= 600 * 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_in_a_cache_keep_their_bits(dtype):
    """Beside keys of any precision, through beams and for heads that share keys."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, HEADS, 7, generator=generator, dtype=wide) * 10.0 ** torch.arange(-18, 17, 5)
    key, value = torch.randn(2, 2, 2, 7, 4, generator=generator).to(dtype)
    cache = make_cache(XFormerConfig(**GEOMETRY, is_decoder=True))
    appended_with_numbers(cache, key[:, :, :4], value[:, :, :4], numbers[..., :4], 0)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = appended_with_numbers(cache, key[[1, 0], :, 4:], value[[1, 0], :, 4:], numbers[[1, 0], :, 4:], 0)
    for one, other in zip(found, (key, value, numbers)):
        assert torch.equal(one, other[[1, 0]])


def test_caches_that_round_are_refused():
    """Rounded bits of a sum are another number altogether."""

    class Rounding(QuantizedCache):
        def __init__(self):  # without the packages that such caches stand on
            Cache.__init__(self, layers=[])

    model = XFormerForCausalLM(XFormerConfig(**GEOMETRY, **GATES, is_decoder=True)).bfloat16()
    with pytest.raises(ValueError, match="which a quantized cache would round; leave `cache_implementation` out"):
        model.generate(tokens(1, 4, high=50), max_new_tokens=2, **{CACHE: Rounding()})


def test_gates_learn_beside_a_cache_in_half_precision():
    """As they do without one: the forward pass of a training step may be given a cache."""
    config = XFormerConfig(**GEOMETRY, **GATES, is_decoder=True)
    torch.manual_seed(0)
    model, ids, found = make_strong(XFormerForCausalLM(config)).bfloat16().eval(), tokens(2, 7, high=50), []
    for cached in (True, False):
        model.zero_grad()
        model(ids, labels=ids, use_cache=cached).loss.backward()
        found.append(model.model.trunk.layers[0].attention.position_terms.forget_proj.weight.grad.clone())
    assert found[0].abs().max() > 0 and torch.equal(*found)
