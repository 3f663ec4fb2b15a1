"""The bias: number by number, and in a model that is saved and loaded."""

import math
import re
from pathlib import Path

import torch
from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.extend import build_spec

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def test_every_entry():
    position = build_spec("position", "log_distance").build(XFormerConfig(**SIZES))
    with torch.no_grad():
        position.slope.copy_(torch.tensor([1.0, 0.5]))
    block = position.block(torch.arange(4), torch.arange(6))  # [H, Tq, Tk]
    for head, slope in enumerate((1.0, 0.5)):
        for i in range(4):
            for j in range(6):
                assert math.isclose(block[head, i, j].item(), -slope * math.log(1 + abs(i - j)), abs_tol=1e-6)


def test_in_a_model(tmp_path):
    model = XFormerForMaskedLM(XFormerConfig(**SIZES, position={"type": "log_distance", "slope": 0.7})).eval()
    assert all(torch.all(p == 0.7) for name, p in model.named_parameters() if name.endswith("slope"))
    model.save_pretrained(tmp_path)
    again = XFormerForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    other = XFormerForMaskedLM(XFormerConfig(**SIZES, position="none")).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    assert (other(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() > 1e-4  # it matters


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})
