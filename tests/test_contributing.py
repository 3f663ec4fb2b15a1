"""The example of CONTRIBUTING.md is complete: written to files as it says, it is a working variant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USE = """
import sys, torch
import hf_xformers.attention, hf_xformers.variants
hf_xformers.attention.__path__.append(sys.argv[1] + "/attention")
hf_xformers.variants.__path__.append(sys.argv[1] + "/variants")
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
torch.manual_seed(0)
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
config = AutoConfig.for_model("xf_distance_decay", **sizes, attention={"type": "distance_decay", "slope": 0.3})
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(1, 50, (2, 9))
# the fast path against the literal one
fast = model(ids, use_cache=False).logits
literal = model(ids, use_cache=False, output_attentions=True)
torch.testing.assert_close(fast, literal.logits, atol=1e-5, rtol=1e-5)
weights = literal.attentions[0]
assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 9)) and weights.triu(1).abs().max() == 0
expected = model.generate(ids, max_new_tokens=5, use_cache=False)
torch.testing.assert_close(model.generate(ids, max_new_tokens=5), expected)
model.save_pretrained(sys.argv[1] + "/saved")
again = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/saved").eval()
torch.testing.assert_close(again(ids).logits, model(ids).logits)
assert again.config.attention.slope == 0.3
mask = torch.ones_like(ids); mask[0, 6:] = 0
encoder = AutoModelForMaskedLM.from_config(config).eval()
other = ids.clone(); other[0, 6:] = 7
found, expected = (encoder(x, attention_mask=mask).logits[0, :6] for x in (ids, other))
torch.testing.assert_close(found, expected)
try:
    AutoConfig.for_model("xf_distance_decay", attention={"type": "distance_decay", "slope": -1})
except ValueError as error:
    assert "slope" in str(error)
else:
    raise AssertionError("a negative slope was accepted")
print("the example works")
"""


def test_the_example_is_a_working_variant(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"`hf_xformers/(\w+)/distance_decay\.py`:\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    assert [room for room, _ in blocks] == ["attention", "variants"]
    for room, code in blocks:
        (tmp_path / room).mkdir()
        (tmp_path / room / "distance_decay.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", USE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the example works" in done.stdout
