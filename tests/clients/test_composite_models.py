"""transformers' composite models: an encoder of text, images or sound of ours or theirs, and a decoder."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    EncoderDecoderModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderModel,
)

from hf_xformers.variants import config_class, family
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 99, "max_position_embeddings": 32, **SIZES}
IMAGE = {"image_size": 8, "patch_size": 4, **SIZES}


def ours(name, head="Model", **fields):
    return family(name)[head](config_class(name)(**fields, **NO_DROPOUT))


ENCODERS = {
    "ours": lambda: ours("xf_bert", **TEXT),
    "theirs": lambda: BertModel(BertConfig(**TEXT, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
    "wider": lambda: ours("xf_roformer", **{**TEXT, "hidden_size": 24}),
    "images": lambda: ours("xf_vision_transformer", **IMAGE),
    "sound": lambda: ours("xf_conformer", **SIZES, num_mel_bins=10),
}
MADE = {"images": VisionEncoderDecoderModel, "sound": SpeechEncoderDecoderModel}


def given(kind):
    """Two inputs of which the second is shorter, and that one alone."""
    torch.manual_seed(0)
    if kind == "images":
        pixels = torch.randn(2, 3, 8, 8)
        return {"pixel_values": pixels}, {"pixel_values": pixels[1:]}
    if kind == "sound":
        frames, mask = torch.randn(2, 25, 10), torch.ones(2, 25, dtype=torch.long)
        mask[1, 13:] = 0
        return {"input_features": frames, "attention_mask": mask}, {"input_features": frames[1:, :13]}
    ids, mask = pad([tokens(7), tokens(4, seed=1)], 7, "right")
    return {"input_ids": ids, "attention_mask": mask}, {"input_ids": tokens(1, 4, seed=1)}


@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [
        *(("ours", name) for name in ("xf_bert", "xf_gpt2", "xf_performer", "xf_delta_net")),
        *((name, "xf_gpt2") for name in ("theirs", "wider", "images", "sound")),
    ],
)
def test_an_encoder_and_a_decoder(encoder, decoder, tmp_path):
    """From two folders: what is padded changes nothing, all weights learn, generation with a cache is that without
    one, and what is saved comes back."""
    torch.manual_seed(0)
    ENCODERS[encoder]().save_pretrained(tmp_path / "encoder")
    ours(decoder, "ForMaskedLM" if decoder == "xf_bert" else "ForCausalLM", **TEXT).save_pretrained(
        tmp_path / "decoder"
    )
    made = MADE.get(encoder, EncoderDecoderModel)
    model = made.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, None
    make_strong(model).eval()
    both, second = given(encoder)
    text = tokens(2, 5, seed=3)

    model(**both, labels=text).loss.backward()
    assert not [name for name, x in model.named_parameters() if x.grad is None and "encoder.pooler" not in name]
    with torch.no_grad():
        output = model(**both, decoder_input_ids=text, output_attentions=True)
        assert len(output.cross_attentions) == 2
        close(model(**second, decoder_input_ids=text[1:]).logits, output.logits[1:], 1e-4)
        changed = torch.cat([text[:, :3], text[:, 3:].flip(0)], 1)
        close(model(**both, decoder_input_ids=changed).logits[:, :3], output.logits[:, :3], 1e-4)
        (first,) = (name for name in both if name != "attention_mask")
        other = model(**{**both, first: both[first].flip(0)}, decoder_input_ids=text)
        assert not torch.allclose(other.logits, output.logits, atol=1e-3)
        settings = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
        written = [model.generate(**both, use_cache=keeps, **settings) for keeps in (True, False)]
        assert torch.equal(*written)
    model.save_pretrained(tmp_path / "both")
    again, report = made.from_pretrained(tmp_path / "both", output_loading_info=True)
    assert not any(report.values()), report
    close(again.eval()(**both, decoder_input_ids=text).logits, output.logits, 1e-5)


@pytest.mark.parametrize("decoder", ["xf_gpt2", "xf_performer"])
def test_images_in_a_text(decoder, tmp_path):
    """Llava, whose output may be tied to our table, and which makes a cache by itself."""
    torch.manual_seed(0)
    text = config_class(decoder)(**TEXT, **NO_DROPOUT, is_decoder=True)
    vision = config_class("xf_vision_transformer")(**IMAGE)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=-1)
    model = make_strong(LlavaForConditionalGeneration(config)).eval()
    model.generation_config.pad_token_id = 0
    assert model.lm_head.weight is model.get_input_embeddings().weight
    ids = tokens(2, 9)
    ids[:, 2:6] = 4
    both = {"input_ids": ids, "pixel_values": given("images")[0]["pixel_values"]}
    with torch.no_grad():
        expected = model(**both).logits
        settings = {"max_new_tokens": 4, "do_sample": False}
        written = [model.generate(**both, use_cache=keeps, **settings) for keeps in (True, False)]
        assert torch.equal(*written)
    model.save_pretrained(tmp_path)
    again, report = LlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert again.lm_head.weight is again.get_input_embeddings().weight
    close(again.eval()(**both).logits, expected, 1e-5)


def test_a_decoder_that_reads_no_encoder_says_how_to_make_one():
    model = ours("xf_gpt2", "ForCausalLM", **TEXT)
    with pytest.raises(TypeError, match="reads the argument `encoder_hidden_states`; build a decoder with"):
        model(tokens(1, 3), encoder_hidden_states=torch.zeros(1, 2, 16))
