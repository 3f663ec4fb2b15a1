"""What mBART, Marian, PEGASUS and M2M-100 have beyond equal outputs: languages, tables of sinusoids, refusals."""

from __future__ import annotations

import pytest
import torch

from hf_xformers import XFBartConfig, XFBartForSeq2SeqLM
from hf_xformers.conversion import from_transformers, to_transformers
from tests.conversion.architectures import architectures

ALL = architectures()


@pytest.mark.parametrize("name", ["mbart", "m2m_100"])
def test_the_language_that_text_starts_with_travels(name):
    entry = ALL[name]
    model = entry.make(entry.generating())
    model.generation_config.forced_bos_token_id = 7
    ours = from_transformers(model)
    assert ours.generation_config.forced_bos_token_id == 7
    text = ours.generate(**{key: entry.given(entry.generating())[key] for key in ("input_ids", "attention_mask")})
    assert set(text[:, 1].tolist()) == {7}
    assert to_transformers(ours, model_type=name).generation_config.forced_bos_token_id == 7


@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_other_tables_than_sinusoids_are_refused(name):
    model = ALL[name].make(ALL[name].generating())
    table = model.model.decoder.embed_positions.weight
    with torch.no_grad():
        table[3, 0] += 0.1
    with pytest.raises(ValueError, match=r"model.decoder.embed_positions.weight.*sinusoids"):
        from_transformers(model)


@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_half_precision_tables_are_sinusoids(name):
    model = ALL[name].make(ALL[name].generating(), max_position_embeddings=600).bfloat16()
    back = to_transformers(from_transformers(model), model_type=name)
    assert torch.equal(back.model.encoder.embed_positions.weight, model.model.encoder.embed_positions.weight)


@torch.no_grad()
def test_two_vocabularies(tmp_path):
    """Generation, saving, and what cannot be done with two tables."""
    entry = ALL["marian"]
    sizes = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 70}
    model = entry.make("MarianMTModel", seed=5, **sizes)
    model.generation_config.forced_eos_token_id = None
    ours = from_transformers(model)
    assert ours.config.decoder_vocab_size == 70 and ours.config.tie_word_embeddings
    assert ours.lm_head.decoder.weight is ours.model.decoder.embedding.tokens.weight
    assert ours.lm_head.decoder.weight.shape == (70, 32) and ours.get_input_embeddings().weight.shape == (60, 32)
    prompt = {key: entry.given("MarianMTModel")[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**prompt, **options)
    assert torch.equal(ours.generate(**prompt, **options), expected) and len(expected.unique()) > 2
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    assert torch.equal(again.generate(**prompt, **options), expected)
    with pytest.raises(ValueError, match="a token table of its own .`decoder_vocab_size` 70.; keep its size"):
        ours.resize_token_embeddings(90)


def test_a_second_table_of_the_same_size_is_no_shared_one():
    sizes = dict(vocab_size=40, num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=24)
    model = XFBartForSeq2SeqLM(XFBartConfig(**sizes, decoder_vocab_size=40))
    assert model.lm_head.decoder.weight is model.model.decoder.embedding.tokens.weight
    assert model.model.trunk.embedding.tokens.weight is not model.model.decoder.embedding.tokens.weight
    with pytest.raises(ValueError, match="decoder_vocab_size=40 has no counterpart"):
        to_transformers(model)
