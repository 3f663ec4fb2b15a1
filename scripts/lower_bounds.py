"""Tries the lowest versions that pyproject.toml admits: installs exactly those into a fresh environment and uses the
package.

    python scripts/lower_bounds.py                     in a temporary folder that is removed afterwards
    python scripts/lower_bounds.py --folder /tmp/low   in this one, which stays (and is used again)

Needs a package index that pip can reach; torch alone may be several hundred MB. A bound that fails here has to be
raised.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SMOKE = """
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers import TrainingArguments

import hf_xformers
from hf_xformers.training import XFormerTrainer
from hf_xformers.variants import model_types

SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)
ids = torch.randint(5, 50, (4, 12))
mask = torch.ones_like(ids)
mask[1, 8:] = 0


def saved(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder)


print(len(model_types()), "families")
AUTO = {
    "xf_bert": AutoModelForMaskedLM,
    "xf_longformer": AutoModelForMaskedLM,
    "xf_gpt2": AutoModelForCausalLM,
    "xf_delta_net": AutoModelForCausalLM,
    "xf_performer": AutoModelForCausalLM,
    "xf_t5": AutoModelForSeq2SeqLM,
}
for name, auto in AUTO.items():
    model = auto.from_config(AutoConfig.for_model(name, **SIZES))
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    model.eval()
    with torch.no_grad():
        given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        before = model(input_ids=ids, attention_mask=mask, **given).logits
        torch.testing.assert_close(saved(model).eval()(input_ids=ids, attention_mask=mask, **given).logits, before)
    if auto is not AutoModelForMaskedLM:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(mask), max_new_tokens=4)
    print(name, "works")

model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xf_gpt2", **SIZES))
get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))(input_ids=ids, labels=ids).loss.backward()
print("adapters work")
with tempfile.TemporaryDirectory() as folder:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xf_gpt2", **SIZES))
    arguments = TrainingArguments(
        output_dir=folder, max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    XFormerTrainer(model=model, args=arguments, train_dataset=rows).train()
print("training works")
"""


def lowest(requirements: list[str]) -> list[str]:
    """`name>=version` -> `name==version`; what has no lower bound stays as it is."""
    found = []
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9][0-9A-Za-z.]*)", requirement)
        found.append(f"{match[1]}=={match[2]}" if match else requirement)
    return found


def run(*command: str | Path) -> None:
    print("lower_bounds:", " ".join(str(part) for part in command[:6]), flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=tempfile.gettempdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the environment goes (default: a temporary folder)")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "venv" if folder is None else folder.resolve()
        python = place / "bin" / "python"
        pins = lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
        smoke = Path(temporary) / "smoke.py"
        smoke.write_text(SMOKE)
        try:
            if not python.exists():
                run(sys.executable, "-m", "venv", place)
            run(python, "-m", "pip", "install", "--quiet", "--no-build-isolation", *pins, "setuptools>=77", "wheel")
            run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", ROOT)
            run(python, smoke)
            run(python, "-c", "from hf_xformers.cli import main; raise SystemExit(main(['list', 'bert']))")
        except subprocess.CalledProcessError as error:
            print(
                f"lower_bounds: failed with code {error.returncode}; raise the bound of what fails above.",
                file=sys.stderr,
            )
            return 1
    print("lower_bounds: all work:", " ".join(pins))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
