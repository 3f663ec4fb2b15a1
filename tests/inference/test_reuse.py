"""Caches used more than once: a prefix that several continuations share, tokens that a helper proposed and that are
taken back, and memory that is given back after each call."""

import copy
import functools
import gc

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers.core.cache import cache_layers, make_cache
from tests.common.cases import CASES, covering
from tests.helpers import close, tokens

CAUSAL = [case for case in CASES if case.causal]


@functools.cache
def states(case):
    """What keeps a state, the kind of that state, and the shape of the model around it."""
    config = case.preset
    tower = config.tower("decoder") if config.is_encoder_decoder else config
    kept = {(holder.slot, holder.type, type(layer).__name__) for layer, holder in cache_layers(tower)}
    return kept | {case.shape}


SOME = covering(CAUSAL, states)
each_state = pytest.mark.parametrize("case", SOME, ids=str)


@each_state
def test_one_prefix_for_several_texts(case):
    """Read once, copied for other continuations than the first, and as it was afterwards."""
    model, prefix = case.shared(), tokens(1, 7)
    endings = torch.stack([tokens(3, seed=seed) for seed in (1, 2)])
    source = {} if case.shape == "decoder" else {"encoder_outputs": model.get_encoder()(tokens(1, 6, seed=4))}
    name = "decoder_input_ids" if source else "input_ids"
    with torch.no_grad():
        cache = model(**{name: prefix}, **source, use_cache=True).past_key_values
        for ending in (*endings, endings[0]):
            copied = copy.deepcopy(cache)
            found = model(**{name: ending[None]}, **source, past_key_values=copied, use_cache=True).logits
            whole = torch.cat([prefix, ending[None]], 1)
            close(found, model(**{name: whole}, **source, use_cache=False).logits[:, -3:])
        assert cache.get_seq_length() == 7
        if source:
            return  # beam search repeats these: tests/common/test_generation.py
        cache.batch_repeat_interleave(2)
        found = model(endings, past_key_values=cache, use_cache=True).logits
        whole = torch.cat([prefix.expand(2, -1), endings], 1)
        close(found, model(whole, use_cache=False).logits[:, -3:])


@each_state
def test_turns_of_a_chat(case):
    """As transformers' documentation keeps one: an empty cache of its own is given to one call after the other."""
    model, text = case.shared(), tokens(1, 9)
    name, source, cache = "input_ids", {}, DynamicCache(config=model.config)
    if case.shape == "seq2seq":
        name, cache = "decoder_input_ids", EncoderDecoderCache(DynamicCache(), DynamicCache())
        source = {"encoder_outputs": model.get_encoder()(tokens(1, 6, seed=4))}
    with torch.no_grad():
        whole = model(**{name: text}, **source, use_cache=False).logits
        for turn in (slice(0, 4), slice(4, 5), slice(5, 9)):
            output = model(**{name: text[:, turn]}, **source, past_key_values=cache, use_cache=True)
            close(output.logits, whole[:, turn])
            assert output.past_key_values is cache and cache.get_seq_length() == turn.stop


@each_state
def test_speculative_decoding(case):
    """A helper that is often wrong, and words of the prompt: the same text as without, or a refusal where a state
    cannot forget what was proposed in vain."""
    model = case.shared()
    ids = torch.cat([tokens(1, 4), tokens(1, 4)], 1)  # what comes again can be looked up
    settings = {"max_new_tokens": 8, "do_sample": False}
    helper = case.build()
    with torch.no_grad():
        for parameter in helper.parameters():
            parameter.mul_(1.1)
    helps = ({"assistant_model": helper}, {"prompt_lookup_num_tokens": 2})
    if not make_cache(model.config).is_croppable:
        for given in helps:
            with pytest.raises(ValueError, match="cannot check drafted tokens, .* leave `assistant_model`"):
                model.generate(ids, **settings, **given)
        if case.shape == "decoder":
            target = next(case for case in CASES if str(case) == "xf_gpt2-decoder").shared()
            with pytest.raises(ValueError, match="cannot draft tokens for another model, .* take an assistant model"):
                target.generate(ids, **settings, assistant_model=model)
        return
    expected = model.generate(ids, **settings)
    for given in helps:
        assert torch.equal(model.generate(ids, **settings, **given), expected)
    with pytest.raises(ValueError, match="first layers .`assistant_early_exit=1`.; leave it out"):
        model.generate(ids, **settings, assistant_early_exit=1)


def test_guidance_is_for_decoders():
    """The prompt that it leaves out is what an encoder reads."""
    model = next(case for case in CASES if str(case) == "xf_t5-seq2seq").shared()
    with pytest.raises(ValueError, match="`guidance_scale=1.5` compares with what is written without the prompt"):
        model.generate(tokens(1, 4), max_new_tokens=2, guidance_scale=1.5)


def bytes_alive():
    """Of all tensors, each storage once."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # not the tensors without memory that an export has left
    found = {}
    for thing in gc.get_objects():
        if type(thing) in kinds and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_memory_is_given_back():
    """As much is alive after the second call as after the first, with every kind of state."""
    few = covering(SOME, lambda case: {part[2] for part in states(case) - {case.shape}})

    def call(case):
        model = case.shared()
        model.generate(tokens(2, 5), max_new_tokens=4, do_sample=False)
        if case.shape == "decoder":
            model(tokens(2, 9), use_cache=True)

    for case in few:
        call(case)
    before = bytes_alive()
    for case in few:
        call(case)
    assert bytes_alive() == before
