"""A running mean: by the literal equation, token by token, and without padding."""

import re
from pathlib import Path

import torch
from hf_xformers import XFormerConfig, XFormerForCausalLM

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
SIZES |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def made(**fields):
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**SIZES, **fields, attention="gated_mean", is_decoder=True))
    model = model.double().eval()
    for parameter in model.parameters():  # so that every term counts
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


class Context:
    """As much of a call as the mechanism asks for."""

    query_padding_mask = unpadding = None


def test_the_equation():
    layer = made().model.trunk.layers[0].attention
    states = torch.randn(1, 7, 16, dtype=torch.float64)
    made_of = {name: getattr(layer, f"{name}_proj")(states)[0].view(7, 2, 8) for name in "qkv"}
    expected = torch.zeros(7, 2, 8, dtype=torch.float64)
    for i in range(7):
        weight = torch.nn.functional.softplus(made_of["k"][: i + 1])
        mean = (weight * made_of["v"][: i + 1]).sum(0) / weight.sum(0)
        expected[i] = torch.sigmoid(made_of["q"][i]) * mean
    found = layer(states, Context()).output
    torch.testing.assert_close(found, layer.o_proj(expected.view(1, 7, 16)))


def test_it_writes_as_it_reads():
    model = made()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # padding on the left
    given = dict(input_ids=IDS, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def test_padding_changes_nothing():
    model = made()
    padded, mask = torch.nn.functional.pad(IDS, (3, 0)), torch.ones(2, 12, dtype=torch.long)
    mask[:, :3] = 0
    found = model(input_ids=padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(found, model(input_ids=IDS).logits)


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})
