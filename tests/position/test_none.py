"""No position: an encoder cannot tell orders apart, a causal decoder can."""

import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from tests.helpers import close, make_strong, tokens

GEOMETRY = dict(
    vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16, position="none"
)


def test_encoder_is_permutation_equivariant():
    torch.manual_seed(0)
    model = make_strong(XFormerModel(XFormerConfig(**GEOMETRY)).double().eval())
    ids, order = tokens(2, 7, high=40), torch.tensor([4, 2, 6, 0, 1, 5, 3])
    mask = torch.tensor([[1] * 7, [1, 0, 1, 1, 0, 1, 1]])
    with torch.no_grad():
        close(model(ids[:, order]).last_hidden_state, model(ids).last_hidden_state[:, order])
        shuffled = model(ids[:, order], attention_mask=mask[:, order]).last_hidden_state
        close(shuffled, model(ids, attention_mask=mask).last_hidden_state[:, order])


def test_decoder_knows_order():
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**GEOMETRY)).double().eval())
    ids = torch.tensor([[5, 6, 7, 8], [6, 5, 7, 8]])
    with torch.no_grad():
        logits = model(ids).logits
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-6
