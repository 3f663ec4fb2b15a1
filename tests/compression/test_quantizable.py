"""What is quantized, and what it does to the outputs; no rounding of torchao's."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from hf_xformers.compression.quantizable import output_errors, random_batch

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = [
    (BertForMaskedLM, BertConfig(**SIZES, vocab_size=30)),
    (T5ForConditionalGeneration, T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)),
    (ViTForImageClassification, ViTConfig(**SIZES, image_size=16, patch_size=8)),
    (ViTForImageClassification, ViTConfig(**SIZES, image_size=(16, 8), patch_size=8)),
]


@pytest.mark.parametrize("cls, config", MODELS)
def test_sensitivity_of_models_of_transformers(cls, config):
    model = cls(config)
    errors = output_errors(model.eval(), [random_batch(model)], lambda module: None)
    assert errors and set(errors.values()) == {0.0}


def test_a_reader_of_sounds_is_refused():
    with torch.device("meta"):
        model = Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, num_conv_pos_embedding_groups=2))
    with pytest.raises(ValueError, match="Wav2Vec2ForCTC reads input_values; leave it out"):
        random_batch(model)
