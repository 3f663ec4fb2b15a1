"""Attention maps of small trained models, for the zoo's pages.

    python -m scripts.docs.trained_maps [VARIANT ...]

Trains each (by default all that have no map yet) as a causal language model of the documentation inside Python's
standard library, or by masked LM where a variant has no decoder (no network, about half a minute each on one core),
and writes `docs/zoo/trained_maps/<model type>.svg` and what they show to `about.json`. The maps are of a piece of
held-out text, at the same cut-down windows and blocks as the untrained maps. A model that has learned nothing beyond
the frequencies of tokens gets no map.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_xformers.cli import main as command
from hf_xformers.data import load_text_dataset
from hf_xformers.hub.attention_map import draw, small_parameters
from hf_xformers.training.run_folder import SUMMARY_FILE
from hf_xformers.variants import config_class, model_types

from .pictures import TRAINED, UNTRAINED, model_type

STEPS, LENGTH, BLOCK = 600, 24, 64
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}


CLEAR = 0.1  # nats below the loss of token frequencies, at least


def writes(name: str) -> bool:
    """Whether a variant is trained as a decoder."""
    return "ForCausalLM" in config_class(name).heads


def train(name: str, folder: Path) -> dict[str, Any]:
    """Trains a variant into `folder`; returns what its run reports."""
    attention = small_parameters(config_class(name), {"is_decoder": writes(name)})
    options: dict[str, Any] = {
        "variant": name,
        "objective": "clm" if writes(name) else "mlm",
        "data": "stdlib",
        "block_size": BLOCK,
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "learning_rate": 0.003,
        "warmup_steps": 50,
        "seed": 0,
        "save_strategy": "no",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "residual": "pre_ln",
        "output_dir": folder,
        **SIZES,
        **{f"attention.{field}": value for field, value in attention.items()},
    }
    words = ["pretrain", *(word for key, value in options.items() for word in (f"--{key}", _word(value)))]
    if command(words) and command([word for word in words if word not in ("--residual", "pre_ln")]):
        raise SystemExit(f"{name} cannot be trained this way")
    return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def picture(folder: Path, decoder: bool) -> str:
    """The map of the last layer of a trained model on held-out text, averaged over heads, as SVG."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = (AutoModelForCausalLM if decoder else AutoModelForMaskedLM).from_pretrained(folder).double().eval()
    text = " ".join(load_text_dataset("stdlib")["validation"][:40]["text"])
    ids = torch.tensor([tokenizer(text)["input_ids"][:LENGTH]])
    with torch.no_grad():
        layers = model(input_ids=ids, output_attentions=True).attentions
    kind = "decoder" if decoder else "encoder"
    maps = {f"{kind}, layer {index}": weights[0].mean(0).float() for index, weights in enumerate(layers)}
    last = list(maps.items())[-1:]
    return draw(dict(last)).replace("untrained, mean over heads, float64", f"trained, {STEPS} steps, mean over heads")


def open_variants() -> list[str]:
    """Variants of text with an untrained map and no trained one."""
    kinds = {model_type(path.stem.removeprefix("xf_")) for path in TRAINED.glob("*.svg")}
    able = [kind for kind in model_types() if {"ForCausalLM", "ForMaskedLM"} & set(config_class(kind).heads)]
    return [kind for kind in able if kind not in kinds and (UNTRAINED / f"{kind}.svg").exists()]


def main(names: list[str]) -> None:
    TRAINED.mkdir(parents=True, exist_ok=True)
    told = TRAINED / "about.json"
    for name in names or open_variants():
        name = name.removeprefix("xf_")
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = train(name, Path(folder))
                if not report["eval_loss"] < report["eval_floor_loss"] - CLEAR:
                    raise ValueError(f"a loss of {report['eval_loss']:.2f}, floor {report['eval_floor_loss']:.2f}")
                drawn = picture(Path(folder), writes(name))
            except (Exception, SystemExit) as error:
                print(f"{name} has no map: {error}", file=sys.stderr)
                continue
        (TRAINED / f"{model_type(name)}.svg").write_text(drawn, encoding="utf-8")
        about = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
        about[model_type(name)] = caption(name, report)
        told.write_text(json.dumps(dict(sorted(about.items())), indent=1) + "\n", encoding="utf-8")


def caption(name: str, report: dict[str, Any]) -> str:
    small = small_parameters(config_class(name), {"is_decoder": writes(name)})
    cut = ", ".join(f"`{field}={value}`" for field, value in small.items())
    kind = "a causal decoder" if writes(name) else "an encoder"
    return (
        f"The last layer of {kind} of two layers, trained for {STEPS} steps on the documentation of Python's"
        f" standard library{f', with {cut}' if cut else ''}, on {LENGTH} tokens of held-out text; mean over heads."
        f" Held-out loss {report['eval_loss']:.2f} nats per token, with token frequencies alone"
        f" {report['eval_floor_loss']:.2f}."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
