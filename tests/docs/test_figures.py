"""Figures of the documentation are those of the committed results, and a wrong marker stops the build."""

from __future__ import annotations

import json
import re

import pytest

from scripts.docs.figures import RESULTS, ROOT, fill, written


def test_figures_of_a_row():
    rows = json.loads((RESULTS / "mechanisms.json").read_text())["rows"]
    row = next(row for row in rows if (row["case"], row["T"]) == ("longformer, window 512", 4096))
    where = "result: mechanisms; case=longformer, window 512; T=4096"
    ratio = row["time ratio"]
    text = f"<!-- {where}; column=time ratio -->, <!-- {where};\n column=time; as=percent -->,"
    text += f" <!-- {where.replace('T=', 'length=').replace(';', ' |')} | column=memory | as=times -->."
    assert fill(text) == f"{ratio:.2f}, {ratio * 100:.0f} %, {1 / row['memory ratio']:.1f} times."


def test_figures_of_several_rows():
    ratios = [row["time ratio"] for row in json.loads((RESULTS / "mechanisms.json").read_text())["rows"]]
    marker = "<!-- result: mechanisms; column=time ratio; as={} -->"
    shown = fill(" ".join(map(marker.format, ("count", "least", "most"))))
    assert shown == f"{len(ratios)} {min(ratios):.2f} {max(ratios):.2f}"


def test_tables():
    chosen = "case=luna / linear causal; columns=variant, case, time ratio, memory ratio"
    lines = fill(f"<!-- table: mechanisms; T=4096; {chosen}; links=zoo -->").splitlines()
    assert lines[:2] == ["| variant | case | time ratio | memory ratio |", "| --- | --- | ---: | ---: |"]
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| [luna](zoo/luna.md)", "luna"],
        ["| [linear_transformer](zoo/linear_transformer.md)", "linear causal"],
    ]
    by_time = fill("<!-- table: mechanisms; T=8192; columns=case, time; sort=time; first=4 -->").splitlines()[2:]
    ratios = [float(line.split("|")[2]) for line in by_time]
    assert len(ratios) == 4 and ratios == sorted(ratios)
    assert "random, as many steps |" in fill("<!-- table: uptraining; columns=swap, random, as many steps -->")


def test_machine():
    machine = json.loads((RESULTS / "decoding.json").read_text())["machine"]
    text = fill("<!-- machine: decoding -->")
    assert machine["device"] in text and f"torch {machine['torch']}" in text


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("result: mechanism; T=4096; column=time", "no results 'mechanism'; there are .*mechanisms"),
        ("result: mechanisms; case=none such; column=time", "no row has case='none such'"),
        ("result: mechanisms; T=4096; column=time", "rows fit, and a figure is that of one"),
        ("result: decoding; model=dense; context=512; column=speed", "no column 'speed'; there are .*model"),
        ("result: decoding; model=dense; context=512; column=context; as=share", "take percent or times"),
        ("table: mechanisms; lengths=4096; columns=case", "no column 'lengths'; there are"),
        ("table: decoding; columns=model, speed", "no column 'speed'"),
        ("table: linearization; columns=model", "no rows 'rows'; it has linearization/Losses"),
        ("result: decoding; dense; column=context", "is no NAME=VALUE"),
    ],
)
def test_wrong_markers_are_refused(marker, message):
    with pytest.raises(ValueError, match=message):
        fill(f"<!-- {marker} -->")


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_figures_in_the_checkout_are_current(path):
    text = path.read_text(encoding="utf-8")
    assert written(path) == text, "stale: run `python -m scripts.docs.figures`"
    assert not re.search(r"<!--\s*(results?|table|machine)\b(?:(?!<!--).)*(?:<!-- (?!/\1)|$)", text, flags=re.DOTALL)
    for card in re.findall(r"\]\((\.\.[^)]*model_cards/[^)]*)\)", text):
        assert (path.parent / card).is_file(), card


def test_what_was_written_is_written_anew(tmp_path):
    marker = "<!-- result: mechanisms; case=luna; T=4096; column=time -->"
    table = "<!-- table: mechanisms; case=luna; T=4096; columns=case, time -->"
    page = tmp_path / "page.md"
    page.write_text(f"Now {marker}9.99<!-- /result --> and {marker}.\n\n{table}\n\n| old |\n\n<!-- /table -->\n")
    ratio = fill(marker)
    expected = f"Now {ratio} and {ratio}.\n\n{fill(table)}\n"
    text = written(page)
    assert fill(page.read_text()) == fill(text) == expected
    page.write_text(text)
    assert written(page) == text and f"{marker}{ratio}<!-- /result -->" in text and "old" not in text
