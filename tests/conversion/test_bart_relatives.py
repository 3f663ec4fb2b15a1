"""What mBART, Marian, PEGASUS and M2M-100 have beyond equal outputs: languages, tables of sinusoids, refusals."""

from __future__ import annotations

import pytest
import torch

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


def test_two_vocabularies_are_refused():
    model = ALL["marian"].make("MarianMTModel", share_encoder_decoder_embeddings=False)
    with pytest.raises(ValueError, match="share_encoder_decoder_embeddings=False"):
        from_transformers(model)
