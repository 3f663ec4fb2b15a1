"""Layers that run twice are a deeper model with the same weights."""

import re
from pathlib import Path

import torch
from hf_xformers import XFormerConfig, XFormerForCausalLM

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"
SIZES = dict(vocab_size=50, hidden_size=16, num_attention_heads=2, intermediate_size=32)
SIZES |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, is_decoder=True)
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def made(**fields):
    torch.manual_seed(0)
    return XFormerForCausalLM(XFormerConfig(**SIZES, **fields)).double().eval()


def test_it_is_a_deeper_model():
    model, deeper = made(stack="repeated", num_hidden_layers=2), made(num_hidden_layers=4)
    weights = model.state_dict()
    for key in list(weights):
        for layer in (0, 1):
            if f".layers.{layer}." in key:
                weights[key.replace(f".layers.{layer}.", f".layers.{layer + 2}.")] = weights[key]
    deeper.load_state_dict(weights)
    torch.testing.assert_close(model(input_ids=IDS).logits, deeper(input_ids=IDS).logits)


def test_it_writes_as_it_reads():
    model = made(stack={"type": "repeated", "rounds": 3}, num_hidden_layers=2)
    given = dict(input_ids=IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})
