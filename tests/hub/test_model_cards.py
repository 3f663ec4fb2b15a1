"""Committed cards are what the generator writes today, and their examples run."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hf_xformers.hub.attention_map import attention_maps, draw
from hf_xformers.hub.model_card import measured_rows, variant_card
from hf_xformers.hub.result_tables import MOST, result_tables
from hf_xformers.variants import config_class, model_types

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "model_cards"
FOLDED = "<details><summary>Settings and further figures</summary>\n\n"


@pytest.mark.parametrize("model_type", model_types())
def test_card_is_current(model_type):
    """It begins with a whole sentence, and the Hub can read its metadata."""
    expected = variant_card(model_type, measured_rows(model_type, ROOT / "benchmarks" / "results"))
    path = CARDS / f"{model_type}.md"
    current = path.exists() and path.read_text(encoding="utf-8") == expected
    assert current, "stale: run `python -m scripts.docs.figures`"
    assert (CARDS / "maps" / f"{model_type}.svg").exists()
    assert expected.partition(f"\n# {model_type}\n\n")[2].partition("\n")[0].endswith(".")
    data = ModelCard(expected).data
    assert data.library_name == "transformers" and data.license == "apache-2.0" and model_type in data.tags
    assert data.pipeline_tag is None and data.language is None  # there are no weights that could do it


def test_no_card_without_a_variant():
    assert {path.stem for path in CARDS.glob("*.md")} == {*model_types(), "README"}


@pytest.mark.parametrize("model_type", ["xf_gpt2", "xf_bert"])
def test_map_shows_who_may_be_read(model_type):
    (weights,) = attention_maps(config_class(model_type)).values()
    assert bool((weights.triu(1) == 0).all()) is (model_type == "xf_gpt2")
    assert bool((weights.tril() > 0).any())
    empty = draw({"a": torch.zeros_like(weights)}).count("<rect")
    assert draw({"a": weights}).count("<rect") == empty + int((weights > 0).sum())


def test_what_cards_name_is_there():
    for path in CARDS.glob("*.md"):
        for name in re.findall(r"`(hf_xformers(?:\.\w+)+)", path.read_text(encoding="utf-8")):
            pkgutil.resolve_name(name)


def test_stale_card_is_noticed():
    assert variant_card("xf_bert") != variant_card("xf_bert", [{"variant": "xf_bert", "T": 1}])


def test_examples_run(tmp_path, monkeypatch):
    """Each has names of its own: it is complete."""
    monkeypatch.chdir(tmp_path)
    for model_type in model_types():
        text = (CARDS / f"{model_type}.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert "import hf_xformers" in example  # or the Auto classes would not know it elsewhere
        exec(compile(example, f"{model_type}.md", "exec"), {"__name__": model_type})


@pytest.mark.parametrize("model_type", model_types())
def test_measured_tables_show_few_columns(model_type):
    """Those that are folded away may have more."""
    measured = (CARDS / f"{model_type}.md").read_text(encoding="utf-8").partition("\n## Measured\n")[2]
    shown = re.sub(r"<details>.*?</details>", "", measured.partition("\n## ")[0], flags=re.DOTALL)
    assert all(line.count("|") - 1 <= MOST for line in shown.splitlines() if line.startswith("|"))
    assert shown.count("\n### ") == len(re.findall(r"^### .+\n\n[^|\n].+\n\n\|", shown, flags=re.MULTILINE))


def test_measured_values_are_legible(tmp_path):
    """Small rates, absent values, and files whose figures are of another unit."""
    for name, row in (
        ("few_labels", {"variant": "xf_bert", "set-up": "a", "probe": 59.79, "control": None}),
        ("objectives", {"variant": "xf_bert", "set-up": "a", "probe": 0.62, "learning rate": 0.003, "loss": 0.0}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [row]}))
    text = variant_card("xf_bert", measured_rows("xf_bert", tmp_path))
    measured, known = text.partition("## Measured\n\n")[2].partition("\n\n## ")[0], result_tables()
    assert measured == (
        f"### Few labels\n\n{known['few_labels'].caption}\n\n| probe |\n|---|\n| 59.79 |\n\n{FOLDED}"
        "| probe | set-up |\n|---|---|\n| 59.79 | a |\n\n</details>\n\n"
        f"### Pretraining objectives\n\n{known['objectives'].caption}\n\n"
        f"| loss | probe |\n|---|---|\n| 0.00 | 0.62 |\n\n{FOLDED}"
        "| loss | set-up | learning rate |\n|---|---|---|\n| 0.00 | a | 0.003 |\n\n</details>"
    )
