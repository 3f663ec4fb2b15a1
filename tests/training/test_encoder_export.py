"""The encoder of a translation model, taken out: the same outputs, nothing of the decoder."""

import pytest
import torch
from transformers import AutoModel

from hf_xformers.training.encoder_export import encoder_only
from hf_xformers.variants import config_class, family

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize("variant", ["xf_bart", "xf_t5"])
def test_the_encoder_alone(tmp_path, variant):
    torch.manual_seed(0)
    config = config_class(variant)(**SHAPE, is_encoder_decoder=True, pad_token_id=0)
    model = family(variant)["ForSeq2SeqLM"](config).eval()
    encoder = encoder_only(model)
    ids, mask = torch.randint(1, 40, (2, 7)), torch.ones(2, 7).long()
    mask[1, 4:] = 0
    with torch.no_grad():
        inside = model(input_ids=ids, attention_mask=mask, labels=ids).encoder_last_hidden_state
        assert torch.equal(encoder(input_ids=ids, attention_mask=mask).last_hidden_state, inside)
    # No parameter of the decoder is left, and none of the encoder is missing.
    assert encoder.num_parameters() == sum(p.numel() for p in model.model.trunk.parameters())
    assert not any("decoder" in name for name, _ in encoder.named_parameters())
    encoder.save_pretrained(tmp_path)
    again, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not again.config.is_encoder_decoder
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids, attention_mask=mask).last_hidden_state, inside)
    with pytest.raises(ValueError, match="no encoder-decoder of this package"):
        encoder_only(encoder)
