"""How many bits does a pixel of a held-out digit cost what reads an image as a text of intensities?

python benchmarks/images.py [--steps 600]

scikit-learn's digits: 1797 images of 8 x 8 pixels with 17 intensities, of which the last 297 are held out. Every model
has three layers (four where half of them read other tokens), width 64, and the same batches in the same order. The
first pixel is given and the others are predicted. Two floors stand beside the results: the frequencies of intensities,
and those of each pixel by itself, with one count added.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from measure import write_results
from sklearn.datasets import load_digits
from torch import Tensor

from hf_xformers.configuration_xformer import XFormerConfig
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
COLUMNS = ["model", "layers", "bits per pixel", "processor seconds"]


def models() -> dict[str, dict[str, Any]]:
    """Fields of a config beside those of `SHAPE`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    data = images()
    train, test = data[:TRAINED], data[TRAINED:]
    rows: list[dict[str, Any]] = [
        {"model": name, "layers": None, "bits per pixel": bits, "processor seconds": None}
        for name, bits in floors(train, test).items()
    ]
    for name, fields in models().items():
        rows.append({"model": name, **trained(fields, train, test, steps)})
        print(rows[-1], flush=True)
    note = (
        f"Bits per pixel of {len(test)} held-out images of scikit-learn's digits (8 x 8 pixels, {LEVELS} intensities)"
        f" after {steps} steps of 32 images; the floors know frequencies of intensities alone."
    )
    write_results("images", rows, COLUMNS, "Images as texts of intensities", note)


if __name__ == "__main__":
    main()
