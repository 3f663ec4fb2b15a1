"""Raw files for the commands, made of the data that the benchmarks read: documents of sentences, several texts to a
summary, and images by class."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRAISING, OTHERS = 2, 4  # review sentences of a document
CAPTIONS, WORDS = 3, 4  # texts of a document; words of each in its summary
HELD_IMAGES = 297


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def reviews(data: Path, folder: Path) -> list[str]:
    """`train.jsonl` and `test.jsonl` with `sentences`, six of SST-2 in a drawn order, and `summary`, the two of them
    that praise; each sentence is in one document at most."""
    files = []
    for split, name in (("train", "train"), ("dev", "test")):
        lines = (data / "sst2" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        pairs = [line.split("\t") for line in lines if line.strip()]
        praise, other = ([text for text, label in pairs if label == wanted] for wanted in ("1", "0"))
        draw, rows = random.Random(0), []
        for number in range(min(len(praise) // PRAISING, len(other) // OTHERS)):
            good = praise[PRAISING * number : PRAISING * (number + 1)]
            sentences = [*good, *other[OTHERS * number : OTHERS * (number + 1)]]
            draw.shuffle(sentences)
            rows.append({"sentences": sentences, "summary": [text for text in sentences if text in good]})
        files.append(_write(folder / f"{name}.jsonl", rows))
    return files


def captions(data: Path, folder: Path) -> list[str]:
    """`train`, `validation` and `test.jsonl` with `document`, three English captions of Multi30k, and `summary`, the
    first four words of each, which name who or what is seen."""
    files = []
    for split, name in (("train", "train"), ("val", "validation"), ("test_2016_flickr", "test")):
        lines = (data / "multi30k" / f"{split}.en").read_text(encoding="utf-8").splitlines()
        texts = [line.strip() for line in lines if line.strip()]
        rows = []
        for begin in range(0, len(texts) - CAPTIONS + 1, CAPTIONS):
            part = texts[begin : begin + CAPTIONS]
            rows.append({"document": part, "summary": " , ".join(" ".join(text.split()[:WORDS]) for text in part)})
        files.append(_write(folder / f"{name}.jsonl", rows))
    return files


def digits(folder: Path) -> str:
    """scikit-learn's 1797 digits as `train/CLASS/N.png` and, the last 297, `test/CLASS/N.png`; returns the folder."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    held = len(found.images) - HELD_IMAGES
    for number, (pixels, label) in enumerate(zip(found.images, found.target)):
        place = folder / ("train" if number < held else "test") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels / 16 * 255).round().astype(np.uint8)).save(place / f"{number}.png")
    return str(folder)
