"""The notebooks run from top to bottom, what they train stands clear of its baseline, and the outputs that are stored
in them are those of their cells."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from scripts.docs.run_notebooks import FOLDER, execute, store

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def mixes_learn(names, printed):
    baseline = 1 / names["MODULUS"]
    assert all(right > 4 * baseline for _, right in names["results"].values()), printed


def swaps_keep(names, printed):
    baseline = names["baseline"]()
    shares = [float(share) / 100 for share in re.findall(r"(?:source|uptrained) (\d+\.\d)%", printed)]
    assert len(shares) == 3 and min(shares) > 4 * baseline, printed


def maps_show_the_copy(names, printed):
    assert names["second_half"](names["model"]) > 4 / names["VOCABULARY"], printed
    half, weights = names["HALF"], names["map_of"](names["model"])
    looks_at = weights[half : 2 * half - 1].argmax(-1).tolist()
    assert sum(place == index + 1 for index, place in enumerate(looks_at)) > 0.8 * len(looks_at), printed


def checkpoints_keep(names, printed):
    assert names["difference"] < 1e-5, printed
    assert printed.count("The capital of France is Paris.") == 2, printed
    llama, window = (float(size) for size in re.findall(r"(\d+) MB", printed))
    assert window < llama / 8, printed


LEARNED = {
    "published_checkpoints": checkpoints_keep,
    "mix_components": mixes_learn,
    "swap_checkpoint": swaps_keep,
    "attention_maps": maps_show_the_copy,
}


def test_every_notebook_has_a_bar():
    assert [path.stem for path in NOTEBOOKS] == sorted(LEARNED)


def stored(path) -> list[str]:
    """What is stored of each cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join("".join(output["text"]) for output in cell.get("outputs", ())) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    """Figures and shades may differ from those that are stored, with the versions and the processor; lines may not."""
    if path.stem == "published_checkpoints" and not (Path(os.environ.get("MODELS", "")) / "smollm2").exists():
        pytest.skip("set MODELS to the folder that scripts/real_models.sh has made")
    found = execute(path)
    LEARNED[path.stem](found.names, "".join(found.printed))
    assert [len(text.splitlines()) for text in stored(path)] == [len(text.splitlines()) for text in found.printed]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_small(path):
    """Text alone, and no number that says how often a cell ran."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and path.stat().st_size < 20_000
    for cell in book["cells"]:
        assert cell["cell_type"] == "markdown" or cell["execution_count"] is None


def test_store(tmp_path):
    path = tmp_path / "small.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n"]},
        {"cell_type": "code", "source": ["from dataclasses import dataclass\n", "print(1 + 1)"]},
        {"cell_type": "code", "source": ["@dataclass\n", "class A:\n", "    b: int = 1"], "outputs": ["old"]},
    ]
    path.write_text(json.dumps({"cells": cells}))
    store(path)
    assert stored(path) == ["", "2\n", ""]
    assert json.loads(path.read_text())["cells"][2]["outputs"] == []
