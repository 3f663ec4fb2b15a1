"""What differs between releases of transformers: a cache has either name as an input, and one name in outputs."""

import warnings

import pytest
import torch

from hf_xformers.core.cache import make_cache
from hf_xformers.core.compat import CACHE
from hf_xformers.variants import config_class, family
from tests.helpers import NO_DROPOUT, close, gradients, tiny_fields, tokens

HEADS = [("xf_gpt2", "Model"), ("xf_gpt2", "ForCausalLM"), ("xf_indigo", "ForCausalLM"), ("xf_t5", "ForSeq2SeqLM")]
NAMES = ("past_key_values", "cache")
each_head = pytest.mark.parametrize(("name", "head"), HEADS)


def build(name, head):
    kind = {"ForSeq2SeqLM": "seq2seq", "ForCausalLM": "decoder"}.get(head, "encoder")
    fields = {**tiny_fields(config_class(name), kind), "is_encoder_decoder": kind == "seq2seq", **NO_DROPOUT}
    torch.manual_seed(0)
    return family(name)[head](config_class(name)(**fields)).double().eval()


def call(model, ids, **more):
    text = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    output = model(**{"input_ids": tokens(2, 5), text: ids}, **more)
    return output, output.last_hidden_state if "last_hidden_state" in output else output.logits


@each_head
@pytest.mark.parametrize("given", NAMES)
def test_a_cache_under_either_name(name, head, given):
    model, ids = build(name, head), tokens(2, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        begun, _ = call(model, ids[:, :4], use_cache=True)
        assert CACHE in begun.keys()
        output, states = call(model, ids[:, 4:], **{given: begun[CACHE]}, use_cache=True)
        close(states, call(model, ids)[1][:, 4:])
    assert output[CACHE] is begun[CACHE] and output.past_key_values is output[CACHE]
    assert output[CACHE].get_seq_length() == 6
    output.past_key_values = other = make_cache(model.config)  # what reads and sets the former name goes on
    assert output[CACHE] is other and getattr(output, CACHE) is other


@each_head
def test_two_caches_are_refused(name, head):
    model = build(name, head)
    with pytest.raises(ValueError, match=r"`cache` and `past_key_values` are two names .* give one of them"):
        call(model, tokens(2, 3), **{given: make_cache(model.config) for given in NAMES})


@pytest.mark.parametrize("given", NAMES)
def test_a_tower_takes_either(given):
    tower, ids = build("xf_gpt2", "ForCausalLM").get_decoder(), tokens(1, 5)
    with torch.no_grad():
        cache = tower(input_ids=ids[:, :3], use_cache=True)[CACHE]
        output = tower(input_ids=ids[:, 3:], use_cache=True, **{given: cache})
        close(output.last_hidden_state, tower(input_ids=ids).last_hidden_state[:, 3:])


@pytest.mark.parametrize(("name", "head"), HEADS[1:])
def test_checkpointed_layers_do_not_write_twice(name, head):
    """A layer that runs again for the gradient would find its own keys in the cache it was given."""
    model, ids = build(name, head).train(), tokens(2, 6)
    expected = gradients(model, call(model, ids, use_cache=False)[1])
    model.activation_checkpointing_enable()
    output, logits = call(model, ids, past_key_values=make_cache(model.config))
    found = gradients(model, logits)
    assert output.get(CACHE) is None
    for key, gradient in expected.items():
        close(found[key], gradient)
