"""The results' pages: no figure in a table that the JSON has not, charts of the same numbers, drawn alike."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree

import numpy as np
import pytest

from hf_xformers.hub.result_tables import MOST, result_tables
from hf_xformers.variants import config_class, model_types
from scripts.docs import pictures, results
from scripts.docs.charts import PLANS, charts_of

# Differences of which a chart would show nothing, and more cases than a chart can hold.
TABLES_ONLY = {"conversion", "gpu_families", "gpu_layers"}
FIGURE = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


def charts(name):
    return charts_of(name, results.tables_of(name), results.section_of)


def stands_for(figure: str, number: float) -> bool:
    """Whether a number of the JSON may be shown as this figure: rounded at its last digit."""
    mantissa, _, power = figure.replace(",", "").partition("e")
    unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    return abs(float(mantissa) * 10.0 ** int(power or 0) - number) <= 0.5001 * unit


@pytest.mark.parametrize("name", results.files())
def test_every_figure_stands_in_the_json(name):
    rows = [row for table in results.tables_of(name).values() for row in table]
    cells = [value for row in rows for value in row.values()]
    numbers = [value for value in cells if isinstance(value, (int, float))]
    numbers += range(1, len(rows) + 1)  # of rows that have a list below their table
    words = {
        figure for text in [*map(str, cells), *(key for row in rows for key in row)] for figure in FIGURE.findall(text)
    }
    text = results.result(name)
    for line in text.splitlines():
        if line.lstrip().startswith("| ") and "---" not in line:
            for figure in set(FIGURE.findall(re.sub(r"\]\([^)]*\)", "]", line))) - words:
                assert any(stands_for(figure, number) for number in numbers), (figure, line)
    assert text.count("\n| ") >= len(rows)


@pytest.mark.parametrize("name", results.files())
def test_tables_show_few_columns(name):
    """What is folded away is indented; every column is in one of the two."""
    text = results.result(name)
    shown = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert all(line.replace("\\|", "").count("|") - 1 <= MOST + 1 for line in shown)  # one for the number of a row
    rows = [row for table in results.tables_of(name).values() for row in table]
    grouped = {column for place, column in results.GROUPS.items() if place.partition("/")[0] == name}
    for key in {key for row in rows for key, value in row.items() if value not in (None, "")} - grouped:
        assert re.search(rf"\| {re.escape(key)} \||note \"{re.escape(key)} of each", text), key


@pytest.mark.parametrize("name", results.files())
def test_tables_in_the_checkout_show_few_columns(name):
    """With as many rows as there were; what is folded away stands in a table of its own."""
    text = (results.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    open_tables = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    lines = [line.replace("\\|", "") for line in open_tables.splitlines() if line.startswith("|")]
    assert lines and all(line.count("|") - 1 <= MOST for line in lines)
    assert not re.search(r"\d{10}", open_tables), "a figure that no one reads"


def test_columns_that_are_named_first_exist():
    for place, known in result_tables().items():
        name, _, part = place.partition("/")
        rows = results.tables_of(name)[part or "rows"]
        assert set(known.columns) <= {key for row in rows for key in row} and len(known.columns) <= MOST, place


@pytest.mark.parametrize("name", results.files())
def test_charts_are_of_the_json(name):
    rows = [row for table in results.tables_of(name).values() for row in table]
    values = {value for row in rows for value in row.values() if isinstance(value, (int, float))}
    for chart in charts(name):
        assert chart.points and all(y in values for points in chart.points.values() for _, y in points)
        assert chart.x and chart.title


@pytest.mark.parametrize("name", results.files())
def test_every_result_file_has_its_section(name):
    assert (name in PLANS) != (name in TABLES_ONLY), f"{name}.json needs a Plan in charts.py, or is for tables only"
    assert bool(charts(name)) == (name in PLANS), f"the Plan of {name}.json draws nothing"
    assert f"[{results.said(name)[0]}]({name}.md)" in results.overview()
    parts = {"rows": name} | {part: f"{name}/{part}" for part in results.tables_of(name) if part != "rows"}
    for part, rows in results.tables_of(name).items():
        column = results.GROUPS.get(parts[part])
        assert column is None or all(column in row for row in rows), f"rows of {name} have no {column}"


def test_maps_of_trained_models():
    """Each has its map, or the reason why there is none."""
    found = pictures.trained()
    assert set(found) <= set(model_types())
    for key, run in found.items():
        assert (pictures.TRAINED / f"{key}.svg").exists() != ("no map" in run), key
        assert "no map" in run or (run["loss"] < run["baseline"] and run["steps"] == pictures.STEPS)


def test_variants_are_compared_with_dense_attention_alike():
    """Of the same position, at equal steps and, between its own runs, at equal time; who has no row is named."""
    rows, curves = (results.files()["pretraining"][key] for key in ("rows", "Dense attention by steps"))
    steps = np.array([150, 300, 600, 1200, 2400])
    decoders = [row for row in rows if row["architecture"] == "decoder"]
    found = set()
    for curve in (curve for curve in curves if curve["variant"] == "xf_gpt2"):
        losses = [curve[f"{count:,} steps"] for count in steps]
        for row in (row for row in decoders if row["position"] == curve["position"]):
            assert row["dense loss"] == losses[2], row["variant"]
            ratio = row.get("time ratio", 0)
            if steps[0] <= 600 * ratio <= steps[-1]:
                expected = np.interp(np.log(600 * ratio), np.log(steps), losses)
                assert row["dense, at equal time"] == pytest.approx(expected), row["variant"]
                found.add(curve["position"])
            else:
                assert "dense, at equal time" not in row, row["variant"]
    assert found == {"learned_absolute", "none", "rotary", "sinusoidal_absolute"}
    named = {row["variant"] for row in rows} | set(re.findall(r"xf_\w+", results.said("pretraining")[1]))
    heads = {"ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM"}
    texts = (kind for kind in model_types() if kind != "xformer" and config_class(kind).modality == "text")
    texts = {kind for kind in texts if config_class(kind).reads_colors != "only"}
    assert named >= {kind for kind in texts if heads & {*config_class(kind).heads}}


def test_names_of_charts_are_unique():
    names = [chart.name for name in results.files() for chart in charts(name)]
    assert len(names) == len(set(names)) > 10


def test_charts_are_drawn_alike_and_load_nothing():
    pytest.importorskip("matplotlib", reason="charts are drawn by matplotlib (the extra `docs`)")
    from scripts.docs.drawing import DARK, drawn

    lines, dots = charts("decoding")[:1], charts("images")[:1]
    first, again = drawn(lines + dots), drawn(lines + dots)
    assert first == again and len(first) == 4
    for path, text in first.items():
        tree.fromstring(text)
        assert not re.search(r'(?:href|src)="(?!#)', text) and "DOCTYPE" not in text
        assert all((color in text) == path.endswith(".light.svg") for color in DARK)


def test_a_result_file_without_a_plan_has_a_page(monkeypatch):
    rows = [{"model": "xf_luna", "figure": 0.5}, {"model": "other", "figure": 12345.678}]
    monkeypatch.setattr(results, "files", lambda: {"new_one": {"machine": {"torch": "9"}, "rows": rows}})
    text = results.result("new_one")
    assert (
        "# New one" in text and "[xf_luna](../zoo/luna.md) | 0.50" in text and "12,346" in text and "torch 9" in text
    )
