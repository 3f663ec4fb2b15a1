"""Attention maps of small trained models, for the zoo's pages: a family for each kind of engine.

    python -m scripts.docs.trained_maps [VARIANT ...]

Trains each as a causal language model of the documentation inside Python's standard library (no network, about half
a minute each on one core) and writes `docs/zoo/trained_maps/<model type>.svg` and what they show to `about.json`. The
maps are of a piece of held-out text, at the same cut-down windows and blocks as the untrained maps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_xformers.cli import main as command
from hf_xformers.data import load_text_dataset
from hf_xformers.hub.attention_map import draw, small_parameters
from hf_xformers.training.run_folder import SUMMARY_FILE
from hf_xformers.variants import config_class

from .pictures import TRAINED, model_type

# One for each way of computing: dense, block-sparse, bucketed, linear, compressed, with a prior, with a span.
VARIANTS = (
    "gpt2",
    "longformer",
    "sparse_transformer",
    "reformer",
    "routing_transformer",
    "linear_transformer",
    "performer",
    "memory_compressed_attention",
    "realformer",
    "adaptive_span",
)
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


def train(name: str, folder: Path) -> dict[str, Any]:
    """Trains a variant into `folder`; returns what its run reports."""
    attention = small_parameters(config_class(name), {"is_decoder": True})
    options: dict[str, Any] = {
        "variant": name,
        "objective": "clm",
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
    command(["pretrain", *(word for key, value in options.items() for word in (f"--{key}", _word(value)))])
    return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def picture(folder: Path) -> str:
    """The map of the last layer of a trained model on held-out text, averaged over heads, as SVG."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    text = " ".join(load_text_dataset("stdlib")["validation"][:40]["text"])
    ids = torch.tensor([tokenizer(text)["input_ids"][:LENGTH]])
    with torch.no_grad():
        layers = model(input_ids=ids, output_attentions=True).attentions
    maps = {f"decoder, layer {index}": weights[0].mean(0).float() for index, weights in enumerate(layers)}
    last = list(maps.items())[-1:]
    return draw(dict(last)).replace("untrained, mean over heads, float64", f"trained, {STEPS} steps, mean over heads")


def main(names: list[str]) -> None:
    TRAINED.mkdir(parents=True, exist_ok=True)
    told = TRAINED / "about.json"
    about = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    for name in names or list(VARIANTS):
        with tempfile.TemporaryDirectory() as folder:
            report = train(name, Path(folder))
            (TRAINED / f"{model_type(name)}.svg").write_text(picture(Path(folder)), encoding="utf-8")
        about[model_type(name)] = caption(name, report)
        told.write_text(json.dumps(dict(sorted(about.items())), indent=1) + "\n", encoding="utf-8")


def caption(name: str, report: dict[str, Any]) -> str:
    small = small_parameters(config_class(name), {"is_decoder": True})
    cut = ", ".join(f"`{field}={value}`" for field, value in small.items())
    return (
        f"The last layer of a causal decoder of two layers, trained for {STEPS} steps on the documentation of Python's"
        f" standard library{f', with {cut}' if cut else ''}, on {LENGTH} tokens of held-out text; mean over heads."
        f" Held-out loss {report['eval_loss']:.2f} nats per token, with token frequencies alone"
        f" {report['eval_floor_loss']:.2f}."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
