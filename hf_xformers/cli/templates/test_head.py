"""Logits are those of a linear head, times what is learned."""

import re
from pathlib import Path

import torch
from hf_xformers import XFormerConfig, XFormerForMaskedLM

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def made(head):
    torch.manual_seed(0)
    return XFormerForMaskedLM(XFormerConfig(**SIZES, head=head)).double().eval()


def test_the_scale(tmp_path):
    model, linear = made({"type": "learned_scale", "start": 2.0}), made("linear")
    linear.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(input_ids=IDS).logits, 2.0 * linear(input_ids=IDS).logits)
    model.save_pretrained(tmp_path)
    again = XFormerForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_it_learns():
    model = made("learned_scale")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.lm_head.log_scale.grad.abs() > 0


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})
