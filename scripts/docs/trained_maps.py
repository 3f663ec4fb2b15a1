"""The attention map of what a small model of every text variant has learned, for the zoo's pages.

    python -m scripts.docs.trained_maps [VARIANT ...]

Trains each (by default all that were not yet trained) as a causal language model of the documentation inside Python's
standard library, or by masked LM where a variant has no decoder (no network, about half a minute each on one core), at
the same cut-down windows and blocks as the untrained maps; `benchmarks/pretraining.py` compares what variants learn.
The maps go to `docs/zoo/trained_maps/<model type>.svg`, what they are of to `about.json` next to them: a piece of
held-out text. A model that has learned nothing beyond the frequencies of tokens gets no map, and `about.json` says so.
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
from hf_xformers.variants import config_class

from .pictures import ABOUT, BLOCK, LENGTH, STEPS, TRAINED, model_type, not_trained

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
# Estimated weights of the trigonometric features may be negative: at the rate of all others sums of them come near
# zero in some step, after which nothing is learned (Choromanski et al. 2021, section 2.3).
LEARNING_RATES = {"xf_performer_v1": 0.0005}
CLEAR = 0.1  # nats below the loss of token frequencies, at least


def writes(name: str) -> bool:
    """Whether a variant is trained as a decoder."""
    return "ForCausalLM" in config_class(name).heads


def train(name: str, decoder: bool, folder: Path) -> dict[str, Any]:
    """Trains a variant into `folder`; returns what its run found, as `about.json` has it."""
    attention = small_parameters(config_class(name), {"is_decoder": decoder})
    options: dict[str, Any] = {
        "variant": name,
        "objective": "clm" if decoder else "mlm",
        "data": "stdlib",
        "block_size": BLOCK,
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "learning_rate": LEARNING_RATES.get(name, 0.003),
        "warmup_steps": 50,
        "seed": 0,
        "save_strategy": "no",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "output_dir": folder,
        **SIZES,
        **{f"attention.{field}": value for field, value in attention.items()},
    }
    words = ["pretrain", *(word for key, value in options.items() for word in (f"--{key}", _word(value)))]
    # Post-LN leaves the level of token frequencies late, whatever the mechanism; residual paths of a kind of their own
    # are what a variant is about.
    post_ln = config_class(name)().to_dict()["residual"]["type"] == "post_ln"
    if (not post_ln or command([*words, "--residual", "pre_ln"])) and command(words):
        raise SystemExit("it cannot be trained this way; the lines above say why")
    report = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return {
        "objective": options["objective"],
        "steps": report["steps"],
        "loss": report["eval_loss"],
        "baseline": report["eval_baseline_loss"],
        "cut": {field: list(value) if isinstance(value, tuple) else value for field, value in attention.items()},
    }


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


def known() -> dict[str, Any]:
    return json.loads(ABOUT.read_text(encoding="utf-8")) if ABOUT.exists() else {}


def main(names: list[str]) -> None:
    TRAINED.mkdir(parents=True, exist_ok=True)
    for key in [model_type(name.removeprefix("xf_")) for name in names] or not_trained():
        decoder = writes(key)
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = train(key, decoder, Path(folder))
                if found["loss"] >= found["baseline"] - CLEAR:
                    raise ValueError("it learned nothing beyond the frequencies of tokens")
                (TRAINED / f"{key}.svg").write_text(picture(Path(folder), decoder), encoding="utf-8")
            except (Exception, SystemExit) as error:
                print(f"{key} has no map: {error}", file=sys.stderr)
                found["no map"] = " ".join(str(error).split())
        about = {**known(), key: found}
        ABOUT.write_text(json.dumps(dict(sorted(about.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
