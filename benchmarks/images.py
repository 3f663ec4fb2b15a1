"""How many bits does a pixel of a held-out digit cost what reads an image as a text of intensities?

python benchmarks/images.py [--steps 600] [--probe]

scikit-learn's digits: 1797 images of 8 x 8 pixels with 17 intensities, of which the last 297 are held out. Every model
has three layers (four where half of them read other tokens), width 64, and the same batches in the same order. The
first pixel is given and the others are predicted. Two baselines stand next to the results: the frequencies of
intensities, and those of each pixel by itself, with one count added.

--probe measures the linear probe alone and leaves the other rows as they are: `hf-xformers pretrain` trains Image GPT
on the digits as a folder of images, without their classes, and `hf-xformers features --probe` fits a linear classifier
to the mean states of its middle layer. Next to it stand the most frequent digit and the same classifier of raw pixels.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import write_results
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from hf_xformers.cli import main as command
from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.finetuning.probe import linear_probe
from hf_xformers.variants.xformer import XFormerForCausalLM

SIDE, LEVELS, TRAINED = 8, 17, 1500
PAD = 17
SHAPE = dict(
    vocab_size=LEVELS + 1,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=SIDE * SIDE,
    pad_token_id=PAD,
    bos_token_id=None,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    residual="pre_ln",
)
COLUMNS = ["model", "layers", "bits per pixel", "probe accuracy", "processor seconds"]
RESULTS = Path(__file__).parent / "results" / "images.json"
IMAGE_GPT, PROBE_LAYERS, PROBE_STEPS = "Image GPT (`pretrain`, `features --probe`), middle layer", 4, 1500
MOST_FREQUENT, RAW_PIXELS = "always the most frequent digit", "raw pixels"


def models() -> dict[str, dict[str, Any]]:
    """Fields of a config besides those of `SHAPE`."""
    rows = {"type": "image_transformer", "image_size": [SIDE, SIDE], "num_channels": 1}
    local = {**rows, "block_length": 16, "memory_length": 16}
    grid = {**rows, "local": "2d", "block_shape": [2, 4], "memory_flange": [2, 4]}
    mixture = {"type": "logistic_mixture", "levels": LEVELS, "num_mixtures": 5}
    return {
        "dense": {"attention": "dense"},
        "Image Transformer, 1-D local": {"attention": local},
        "Image Transformer, 2-D local": {"attention": grid},
        "Image Transformer, 1-D local, mixture of logistics": {
            "attention": local,
            "head": mixture,
            "tie_word_embeddings": False,
        },
        "Axial Transformer": {
            "attention": {"type": "axial_transformer", "columns": SIDE},
            "stack": "axial_transformer",
            "num_hidden_layers": 4,
        },
        "Sparse Transformer, strided": {"attention": {"type": "sparse_transformer", "stride": SIDE}},
    }


def images() -> Tensor:
    """Intensities [1797, 64], row by row."""
    return torch.from_numpy(load_digits().images).long().flatten(1)


def floors(train: Tensor, test: Tensor) -> dict[str, float]:
    """Bits per pixel of what knows frequencies alone; of all pixels but the first."""
    counts = torch.nn.functional.one_hot(train[:, 1:], LEVELS).sum(0).double()  # [pixels, levels]
    by_pixel = (counts + 1) / (counts + 1).sum(-1, keepdim=True)
    overall = counts.sum(0) / counts.sum()
    place = torch.arange(test.shape[1] - 1)
    return {
        "frequencies": -overall[test[:, 1:]].log2().mean().item(),
        "frequencies of each pixel": -by_pixel[place, test[:, 1:]].log2().mean().item(),
    }


def trained(fields: dict[str, Any], train: Tensor, test: Tensor, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = XFormerConfig(**{**SHAPE, "num_hidden_layers": 3, "position": {"type": "axial", "std": 0.02}, **fields})
    model = XFormerForCausalLM(config)
    if fields["attention"] != "dense" and fields["attention"].get("local") == "2d":  # its own order of the pixels
        grid = config.attention.token_grid(config)
        train, test = grid.ordered(train), grid.ordered(test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    generator, start = torch.Generator().manual_seed(0), time.process_time()
    for _ in range(steps):
        batch = train[torch.randint(0, len(train), (32,), generator=generator)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = model.eval()(test, labels=test).loss.item()
    return {"layers": config.num_hidden_layers, "bits per pixel": loss / math.log(2), "processor seconds": seconds}


def write_digits(root: Path) -> None:
    """train/CLASS/N.png and validation/CLASS/N.png, the held-out images as validation."""
    data = load_digits()
    for number, (pixels, digit) in enumerate(zip(data.images, data.target)):
        place = root / ("train" if number < TRAINED else "validation") / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9375).round().astype(np.uint8)).save(place / f"{number}.png")


def probed() -> list[dict[str, Any]]:
    """Rows with the accuracy of linear probes on held-out digits."""
    pixels, digits = images().double(), torch.from_numpy(load_digits().target).long()
    train, test = slice(0, TRAINED), slice(TRAINED, None)
    mean, scale = pixels[train].mean(0), pixels[train].std(0).clamp(min=1e-6)
    scaled = (pixels - mean) / scale
    raw = linear_probe(scaled[train], digits[train], 10)(scaled[test]).argmax(-1)
    most = torch.bincount(digits[train]).argmax()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_digits(folder / "digits")
        shape = f"--hidden_size 64 --num_hidden_layers {PROBE_LAYERS} --num_attention_heads 4 --intermediate_size 256"
        plain = "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --learning_rate 2e-3 --disable_tqdm true"
        run = f"--max_steps {PROBE_STEPS} --per_device_train_batch_size 32 --save_strategy no --logging_steps 250"
        common = ["--data", str(folder / "digits"), *f"{shape} {plain} {run} --eval_steps 500".split()]
        assert command(["pretrain", "--variant", "image_gpt", *common, "--output_dir", str(folder / "run")]) == 0
        asked = f"--layers {PROBE_LAYERS // 2} --probe label --no_progress".split()
        places = ["--model", str(folder / "run"), "--data", str(folder / "digits"), "--output", str(folder / "out")]
        assert command(["features", *places, *asked]) == 0
        summary = json.loads((folder / "run" / "training_summary.json").read_text())
        found = json.loads((folder / "out" / "probe.json").read_text())["validation"]
    seconds = time.process_time() - start
    accuracy = next(iter(found["accuracy"].values()))

    def row(model: str, right: float, **figures: Any) -> dict[str, Any]:
        return {**dict.fromkeys(COLUMNS), "model": model, "probe accuracy": right, **figures}

    return [
        row(MOST_FREQUENT, (digits[test] == most).double().mean().item()),
        row(RAW_PIXELS, (digits[test] == raw).double().mean().item()),
        row(
            IMAGE_GPT,
            accuracy,
            **{"layers": PROBE_LAYERS, "bits per pixel": summary["eval_loss"] / math.log(2)},
            **{"processor seconds": seconds},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--probe", action="store_true", help="measure the linear probe alone")
    arguments = parser.parse_args()
    steps = arguments.steps
    of_probe = (MOST_FREQUENT, RAW_PIXELS, IMAGE_GPT)
    if arguments.probe:
        stored = json.loads(RESULTS.read_text())["rows"]
        rows = [{**dict.fromkeys(COLUMNS), **row} for row in stored if row["model"] not in of_probe]
    else:
        rows = generated(steps)
    rows += probed()
    print(*rows[-3:], sep="\n", flush=True)
    note = (
        f"Bits per pixel of {images().shape[0] - TRAINED} held-out images of scikit-learn's digits (8 x 8 pixels,"
        f" {LEVELS} intensities) after {steps} steps of 32 images; the baselines know frequencies of intensities"
        f" alone. Probe accuracy: a linear classifier of the digit, on held-out images; Image GPT was trained for"
        f" {PROBE_STEPS} steps without the classes, and predicts the first pixel, too."
    )
    write_results("images", rows, COLUMNS, "Images as texts of intensities", note)


def generated(steps: int) -> list[dict[str, Any]]:
    """Rows of baselines and of models that are trained here."""
    data = images()
    train, test = data[:TRAINED], data[TRAINED:]
    rows: list[dict[str, Any]] = [
        {**dict.fromkeys(COLUMNS), "model": name, "bits per pixel": bits} for name, bits in floors(train, test).items()
    ]
    for name, fields in models().items():
        rows.append({**dict.fromkeys(COLUMNS), "model": name, **trained(fields, train, test, steps)})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
