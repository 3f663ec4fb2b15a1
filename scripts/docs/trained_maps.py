"""Every variant of text, trained alike: its losses, and the attention map of what it learned, for the zoo's pages.

    python -m scripts.docs.trained_maps [VARIANT ...]

Trains each (by default all that miss a run) as a causal language model of the documentation inside Python's standard
library, or by masked LM where a variant has no decoder (no network, about half a minute a seed on one core), with
three seeds. `VARIANT/mlm` trains one that has a decoder as an encoder, and a position after another slash takes the
place of the variant's: these are what the others are compared with (`BASELINES`). What the runs found goes to
`docs/zoo/trained_maps/about.json`, the maps of the first seed to `<model type>.svg` next to it; they are of a piece of
held-out text, at the same cut-down windows and blocks as the untrained maps. A model that has learned nothing beyond
the frequencies of tokens gets no map, and `about.json` says so.
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

from .pictures import ABOUT, BLOCK, LENGTH, SEEDS, STEPS, TRAINED, model_type, seeds_left, unfinished

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
LEARNING_RATES = {"performer_v1": 0.0005}
CLEAR = 0.1  # nats below the loss of token frequencies, at least


def writes(name: str) -> bool:
    """Whether a variant is trained as a decoder."""
    return "ForCausalLM" in config_class(name).heads


def train(name: str, decoder: bool, position: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains a variant into `folder`, with a position in place of its own if one is named; returns what the run found,
    its `loss` and `accuracy` and what `about.json` has of all seeds."""
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
        "seed": seed,
        "save_strategy": "no",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "output_dir": folder,
        **SIZES,
        **{f"attention.{field}": value for field, value in attention.items()},
        **({"position": position} if position else {}),
        **({"embedding.scale": "true"} if position == "sinusoidal_absolute" else {}),  # else tokens drown in sinusoids
    }
    words = ["pretrain", *(word for key, value in options.items() for word in (f"--{key}", _word(value)))]
    # Post-LN leaves the level of token frequencies late, whatever the mechanism; residual paths of a kind of their own
    # are what a variant is about.
    residual = config_class(name)().to_dict()["residual"]["type"]
    if residual == "post_ln" and not command([*words, "--residual", "pre_ln"]):
        residual = "pre_ln"
    elif command(words):
        raise SystemExit("it cannot be trained this way; the lines above say why")
    report = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return {
        "objective": options["objective"],
        "residual": residual,
        "steps": report["steps"],
        "loss": report["eval_loss"],
        "baseline": report["eval_baseline_loss"],
        "accuracy": report["eval_accuracy"],
        "baseline accuracy": report["eval_baseline_accuracy"],
        "seconds": report["seconds"],
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
    for key in [model_type(name.removeprefix("xf_")) for name in names] or unfinished():
        for seed in SEEDS if names else seeds_left(key):
            add_run(key, seed)


def add_run(key: str, seed: int) -> None:
    """Trains what a key of `about.json` names with a seed, and notes the run there."""
    name, *changes = key.removeprefix("xf_").split("/")
    decoder = writes(name) and "mlm" not in changes
    position = next((change for change in changes if change != "mlm"), "")
    first = seed == SEEDS[0]
    found: dict[str, Any] = {} if first else known()[key]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = train(name, decoder, position, seed, Path(folder))
            for one, all_of_them in (("loss", "losses"), ("accuracy", "accuracies")):
                run[all_of_them] = [*found.get(all_of_them, []), run.pop(one)]
            found |= run
            if first and run["losses"][0] >= run["baseline"] - CLEAR:
                raise ValueError("it learned nothing beyond the frequencies of tokens")
            if first and not changes:
                (TRAINED / f"{key}.svg").write_text(picture(Path(folder), decoder), encoding="utf-8")
        except (Exception, SystemExit) as error:
            print(f"{key}, seed {seed}: {error}", file=sys.stderr)
            if first:
                found["no map"] = " ".join(str(error).split())
    ABOUT.write_text(json.dumps(dict(sorted({**known(), key: found}.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
