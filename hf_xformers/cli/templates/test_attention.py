"""Scores fall with distance: by the literal equation, in limits, and token by token."""

import re
from pathlib import Path

import torch
from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
SIZES |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def made(model_class, **fields):
    torch.manual_seed(0)
    model = model_class(XFormerConfig(**SIZES, **fields)).double().eval()
    for parameter in model.parameters():  # so that every term counts
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_the_fast_path_gives_what_the_equation_gives():
    for model_class in (XFormerForMaskedLM, XFormerForCausalLM):
        model = made(model_class, attention={"type": "distance_decay", "slope": 0.3})
        literal = model(input_ids=IDS, output_attentions=True)
        torch.testing.assert_close(model(input_ids=IDS).logits, literal.logits)
        assert torch.allclose(literal.attentions[0].sum(-1), torch.ones(2, 2, 9).double())


def test_without_a_slope_it_is_dense_attention():
    flat = made(XFormerForCausalLM, attention={"type": "distance_decay", "slope": 0})
    torch.testing.assert_close(flat(input_ids=IDS).logits, made(XFormerForCausalLM)(input_ids=IDS).logits)


def test_it_writes_as_it_reads():
    model = made(XFormerForCausalLM, attention="distance_decay")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # padding on the left
    given = dict(input_ids=IDS, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})
