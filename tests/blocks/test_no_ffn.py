"""Decoders without a feed-forward: a vanilla decoder whose feed-forwards write nothing."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM
from tests.helpers import close, make_strong

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    is_encoder_decoder=True,
)


def model(decoder, **fields):
    torch.manual_seed(0)
    return make_strong(XFormerForSeq2SeqLM(XFormerConfig(**SIZES, decoder=decoder, **fields)).double().eval())


@pytest.mark.parametrize("residual", ["pre_ln", "post_ln"])
def test_vanilla_with_silent_feed_forwards(residual):
    vanilla, ours = model(None, residual=residual), model({"block": "no_ffn"}, residual=residual)
    missing = ours.load_state_dict(vanilla.state_dict(), strict=False)
    assert not missing.missing_keys
    assert all("decoder.layers" in key and "feedforward" in key for key in missing.unexpected_keys)
    with torch.no_grad():
        for layer in vanilla.model.decoder.layers:
            layer.feedforward.down_proj.weight.zero_()
            layer.feedforward.down_proj.bias.zero_()
            if residual == "post_ln":  # the third norm goes with its sublayer
                layer.feedforward_residual.norm = torch.nn.Identity()
    ids, target = torch.randint(1, 40, (2, 6)), torch.randint(1, 40, (2, 5))
    close(ours(ids, decoder_input_ids=target).logits, vanilla(ids, decoder_input_ids=target).logits)


def test_parameters():
    count = lambda net: sum(parameter.numel() for parameter in net.parameters())  # noqa: E731
    saved = 2 * (2 * 16 * 24 + 24 + 16 + 2 * 16)  # two layers' projections, biases and norms
    assert count(model(None)) - count(model({"block": "no_ffn"})) == saved
