"""Generation with transformers' static cache, compiled decoding, and bfloat16."""

import logging

import pytest
import torch
from transformers import StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.cache import make_cache, stateful_part
from tests.common.cases import CASES, each_causal_component
from tests.helpers import close, make_strong, pad, tokens

CAUSAL = [case for case in CASES if case.causal]


def decoder_config(model):
    return model.config.tower("decoder") if model.config.is_encoder_decoder else model.config


def with_both_caches(model, ids, mask):
    """Six tokens with a growing cache and with a static one: the same, of the same logits. What `generate` gives with
    the latter."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    growing = model.generate(input_ids=ids, attention_mask=mask, **settings)
    fixed = model.generate(input_ids=ids, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(growing.sequences, fixed.sequences)
    close(torch.stack(fixed.logits), torch.stack(growing.logits))
    return fixed


SIZES = {
    **{"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"is_decoder": True, "pad_token_id": 0, "tie_word_embeddings": False},
}
LONG_ROPE = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_max_position_embeddings": 6}
# What counts real tokens, which a static cache has to be told of although its attention takes a mask of pairs.
COUNTING = {
    "bias of places": {"position": "tupe"},
    "table of tasks": {"attention": "ca_mtl"},
    "rotation by length": {
        "position": {"type": "rotary", "scaling": {"type": "dynamic", "factor": 2.0}},
        "max_position_embeddings": 6,
    },
    "two rotations": {"position": {"type": "rotary", "scaling": {"type": "longrope", **LONG_ROPE}}},
    "hashes of pairs": {
        "feedforward": {"type": "hash_layers", "num_experts": 16, "hash": "previous", "layers": (0, 1)}
    },
}


def strong_decoder(**fields):
    torch.manual_seed(0)
    return make_strong(XFormerForCausalLM(XFormerConfig(**{**SIZES, **fields})).double().eval(), amount=0.3)


@pytest.mark.parametrize("name", list(COUNTING))
def test_static_cache_counts_real_tokens(name):
    ids, mask = pad([tokens(5, high=40), tokens(2, seed=1, high=40)], 5, "left")
    ids = torch.where(mask.bool(), ids, tokens(2, 5, seed=2, high=40))  # padding may hold any token
    with_both_caches(strong_decoder(**COUNTING[name]), ids, mask)


LIMITED = {
    "position 'axial'": {"position": {"type": "axial", "shape": (4, 4)}},
    "position 'learned_absolute'": {"position": "learned_absolute"},
    "position 'tupe'": {"position": "tupe"},
    "attention 'ca_mtl'": {"attention": "ca_mtl", "position": "rotary"},
    "attention 'synthesizer'": {"attention": "synthesizer", "position": "sinusoidal_absolute"},
}


@pytest.mark.parametrize("name", list(LIMITED))
def test_static_cache_stays_within_the_table(name):
    model, ids = strong_decoder(max_position_embeddings=16, **LIMITED[name]), tokens(2, 14, high=40)
    settings = {"do_sample": False, "cache_implementation": "static"}
    with pytest.raises(ValueError, match=f"{name} of this model covers 16 .*; set a smaller `max_new_tokens`"):
        model.generate(ids, max_new_tokens=4, **settings)
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3, **settings).shape[1] == 17
    mask = torch.ones_like(ids)
    mask[:, :1] = 0  # padding takes no place
    assert model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, **settings).shape[1] == 18
    # Calls without `generate` are refused where the table ends.
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(2):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="17 tokens"):
            model(ids[:, :1], past_key_values=cache)


@each_causal_component
def test_static_cache(case, caplog, monkeypatch):
    """The same text as with a growing cache; a mechanism with another state takes its own and says so by name."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_xformers"), "propagate", True)
    model = case.shared()
    batch, mask = pad([tokens(5), tokens(3, seed=1)], 5, "left")
    fixed = with_both_caches(model, batch, mask)
    cache = getattr(fixed.past_key_values, "self_attention_cache", fixed.past_key_values)
    part = stateful_part(decoder_config(model))
    assert isinstance(cache, StaticCache) == (not part)
    if not part:
        size = case.run(model, batch, mask).shape[1] + 6 if case.shape == "decoder" else 7
        filled = [layer for layer in cache.layers if layer.is_initialized]  # layers may read what another one keeps
        assert filled and all(layer.keys.shape[2] == size - 1 for layer in filled)
    else:
        kind = part.split("'")[1]
        config = decoder_config(model)
        views = config.layer_configs()
        assert kind in (config.stack.type, config.block.type, *(view.attention.type for view in views))


def test_own_state_is_named(caplog, monkeypatch):
    from hf_xformers.modeling import generation

    said = []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    for name, part in (("xf_performer", "attention 'performer'"), ("xf_cpe", "block 'cpe'"), ("xf_gpt2", None)):
        model = next(case for case in CAUSAL if case.name == name).shared()
        model.generate(tokens(1, 3), max_new_tokens=2, cache_implementation="static")
        assert not said if part is None else part in said.pop()


def test_weights_that_a_state_has_not_are_told_of(monkeypatch):
    from hf_xformers.modeling import generation

    said = []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    wanted = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    for name, keeps_keys in (("xf_performer", False), ("xf_longformer", True)):
        model = next(case for case in CAUSAL if case.name == name and case.shape == "decoder").shared()
        for cached in (True, False):
            steps = model.generate(tokens(1, 3), use_cache=cached, **wanted).attentions
            whole = all(len(step) == model.config.num_hidden_layers for step in steps)
            assert len(steps) == 3 and whole == (keeps_keys or not cached)
            assert bool(said) == (not whole) and all("use_cache=False" in said.pop() for _ in said[:])


NAMES = ("xf_gpt2-decoder", "xf_t5-seq2seq", "xf_longformer-decoder", "xf_realformer-decoder")
COMPILED = [case for case in CAUSAL if str(case) in NAMES]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_one_graph_for_every_step(case):
    """Decoding with a static cache is traced once: no step of it is traced again, and the scores are those of the
    whole."""
    torch._dynamo.reset()
    model, ids = case.shared(), tokens(2, 9)
    cache = StaticCache(config=decoder_config(model), max_cache_len=12)
    given = {}
    if case.shape == "seq2seq":
        from transformers import EncoderDecoderCache

        given = {"encoder_outputs": model.get_encoder()(ids)}
        cache = EncoderDecoderCache(cache, StaticCache(config=decoder_config(model), max_cache_len=9))
    name = "decoder_input_ids" if given else "input_ids"
    compiled, found = torch.compile(model, backend="eager", fullgraph=True, dynamic=False), []
    with torch.no_grad():
        found.append(model(**{name: ids[:, :3]}, **given, past_key_values=cache, use_cache=True).logits)
        for step in range(3, 9):
            with torch._dynamo.config.patch(error_on_recompile=step > 4):
                part = {name: ids[:, step : step + 1]}
                found.append(compiled(**part, **given, past_key_values=cache, use_cache=True).logits)
        expected = model(input_ids=ids, **({name: ids} if given else {})).logits
    close(torch.cat(found, dim=1), expected)


def test_states_are_traced_twice():
    """With a state: the call that reads the text, and all steps after it, whose length is another each time."""
    torch._dynamo.reset()
    model, ids = next(case for case in CAUSAL if case.name == "xf_performer").shared(), tokens(2, 9)
    cache = make_cache(model.config)
    compiled, found = torch.compile(model, backend="eager"), []
    with torch.no_grad():
        found.append(compiled(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).logits)
        for step in range(3, 9):
            with torch._dynamo.config.patch(error_on_recompile=step > 3):
                part = ids[:, step : step + 1]
                found.append(compiled(input_ids=part, past_key_values=cache, use_cache=True).logits)
        close(torch.cat(found, dim=1), model(input_ids=ids).logits)


@each_causal_component
def test_bfloat16_generation(case):
    """Steps in bfloat16 score as the whole text does in bfloat16, up to its rounding."""
    reason = case.exception("half_precision")
    if reason is not None:
        pytest.skip(reason)
    model = case.shared(torch.bfloat16)
    ids = tokens(2, 4)
    output = model.generate(
        ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        if case.shape == "decoder":
            whole = model(output.sequences[:, :-1], use_cache=False).logits[:, 3:]
        else:
            whole = model(input_ids=ids, decoder_input_ids=output.sequences[:, :-1], use_cache=False).logits
    steps = torch.stack(output.logits, dim=1)
    assert steps.shape == whole.shape and steps.isfinite().all()
    close(steps.float(), whole.float(), 0.1)
