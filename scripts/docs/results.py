"""The results' pages: one per committed JSON file of `benchmarks/results/`, its rows as they are, with its charts."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Container, Iterator
from textwrap import indent
from typing import Any

from hf_xformers.benchmark.tables import DAY
from hf_xformers.hub.result_tables import ResultTable, parted, result_tables

from . import catalog
from .charts import charts_of
from .markup import REPOSITORY, ROOT, Pages, code, link, page, table

FOLDER = ROOT / "benchmarks" / "results"
INDEX = "results/index.md"
LONG = 60  # characters of a cell that would make a table unreadable: such columns are listed below it
Row = dict[str, Any]

# What a column means wherever it appears; notes of a file say what is special about it.
MEANINGS = {
    "T": "tokens",
    "context": "tokens that were read before",
    "time ratio": "time by that of dense attention (or what the note names): below 1 is faster",
    "FLOP ratio": "arithmetic by that of dense attention",
    "memory ratio": "peak memory by that of dense attention: below 1 is less",
    "ms": "milliseconds of a step, forward and backward",
    "peak MiB": "peak memory of a step, in MiB",
    DAY: "on which day",
    "others busy": "how many of the machine's processors other programs kept busy: above 0.2 ratios may be too high",
    "peer time ratio": "the other implementation's time by dense attention's",
    "peer memory ratio": "the other implementation's peak memory by dense attention's",
    "time / peer": "time by the other implementation's: below 1 is faster than it",
    "memory / peer": "peak memory by the other implementation's",
    "FLOPs / peer": "arithmetic by the other implementation's",
    "loss": "held-out loss in nats per token, after the same number of steps",
    "dense loss": "that of dense attention after the same number of steps",
    "dense, at equal time": "that of dense attention trained for the same time",
    "control": "that of the same configuration with the plain part in place of the variant's own",
    "token frequencies": "what is reached by knowing how frequent tokens are, and nothing else",
    "against transformers": "tokens per second by those of transformers' model that the note names: above 1 is faster",
    "cache MiB": "what a cache holds after the context, in MiB",
    "reading s": "seconds for the context",
    "baseline": "what a trivial rule reaches, without a model; where there is a column `of`, it says which rule",
    "trivial baseline": "the loss that is reached by knowing how frequent targets are, and nothing else",
    "beats the baseline": "whether the model learned more than that",
    "probe": "accuracy on SST-2 of a linear classifier of frozen states",
    "majority": "accuracy of always naming the most frequent class",
    "mean layers": "passed by a row, of as many as `of` says",
    "KL at the swap": "divergence of the predictions from the source's",
}
# How the rows of a file, or of one of its tables, are put in tables of their own.
GROUPS = {
    "components": "slot",
    "compression": "task",
    "compression_published": "task",
    "exits": "variant",
    "finetuning": "task",
    "inference": "what",
    "pretraining": "architecture",
    "training_claims": "claim",
    "transfer": "task",
}


@functools.cache
def files() -> dict[str, dict[str, Any]]:
    """Name -> content of every result file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def tables_of(name: str) -> dict[str, list[Row]]:
    """The lists of rows in a result file, by their keys."""
    return {key: value for key, value in files()[name].items() if isinstance(value, list)}


def page_of(name: str) -> str:
    return f"results/{name}.md"


@functools.cache
def said(name: str) -> tuple[str, str]:
    """Title and note of a result file, as its benchmark wrote them next to it."""
    path = FOLDER / f"{name}.md"
    if not path.exists():
        return name.replace("_", " ").capitalize(), ""
    title, *parts = path.read_text(encoding="utf-8").split("\n\n")
    notes = []
    for part in parts:
        if part.startswith(("Measured on ", "|", "#")):
            break
        notes.append(part.strip())
    return title.removeprefix("# ").strip(), "\n\n".join(notes)


def days(name: str) -> str:
    """When the rows of a file were measured: the first day and the last."""
    known = sorted({str(row[DAY]) for rows in tables_of(name).values() for row in rows if DAY in row})
    return " to ".join(dict.fromkeys([known[0], known[-1]])) if known else ""


def pages() -> Pages:
    made = {page_of(name): result(name) for name in files()}
    made[INDEX] = overview()
    return made


def overview() -> str:
    rows = []
    for name in files():
        title, _ = said(name)
        count = sum(map(len, tables_of(name).values()))
        rows.append({"what": link(title, INDEX, page_of(name)), "rows": count, DAY: days(name)})
    return page(
        "Results",
        "Everything that was measured, as it is committed: each page is made from one JSON file, no figure is typed by"
        " hand. `benchmarks/` has the program of each, which writes the file anew.",
        table(rows),
        "Most were measured on one thread of a small CPU. Ratios carry over to other machines better than times; a"
        " result is next to its baseline or its dense counterpart, measured alternately with it.",
    )


def result(name: str) -> str:
    here = page_of(name)
    title, note = said(name)
    parts = [note, _machine(name)]
    charts = charts_of(name, tables_of(name), section_of)
    if charts:
        parts.append('<div class="plots" markdown="1">')
        for chart in charts:
            both = (f"![{chart.alt}](plots/{chart.name}.{mode}.svg#only-{mode})" for mode in ("light", "dark"))
            parts.append(" ".join(both))
        parts.append("</div>")
    columns: set[str] = set()
    for key, rows in tables_of(name).items():
        columns |= {column for row in rows for column in row}
        if key != "rows":
            parts.append(f"## {key}")
        for heading, group in _groups(name, key, rows):
            column = GROUPS.get(_place(name, key), "") if heading else ""  # which the heading says
            parts += [f"### {heading}" if heading else "", *_table(group, here, _place(name, key), {column})]
    known = [f"- {code(column)}: {MEANINGS[column]}." for column in MEANINGS if column in columns]
    if known:
        parts.append("## What the columns mean\n\n" + "\n".join(known))
    return page(title, *parts, description=title)


def _machine(name: str) -> str:
    machine = files()[name].get("machine", {})
    facts = {
        "machine": machine.get("device"),
        "threads": machine.get("threads"),
        "torch": machine.get("torch"),
        "transformers": machine.get("transformers"),
        "Python": machine.get("python"),
        DAY: days(name) or None,
    }
    told = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    source = f"[`{name}.json`]({REPOSITORY}/blob/main/benchmarks/results/{name}.json)"
    program = ROOT / "benchmarks" / f"{name}.py"
    made = f", written by [`{program.name}`]({REPOSITORY}/blob/main/benchmarks/{name}.py)" if program.exists() else ""
    return f"Measured on: {told}. The rows are those of {source}{made}."


def section_of(row: Row) -> str:
    """The survey's section of a row's variant, as a heading."""
    name = str(row.get("variant", "")).removeprefix("xf_")
    return catalog.section_title(catalog.variants()[name].info.section) if name in catalog.variants() else "Others"


def _place(name: str, part: str) -> str:
    """What a table of a file is called in `GROUPS` and `results.toml`."""
    return name if part == "rows" else f"{name}/{part}"


def _groups(name: str, part: str, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Headings and rows of the table `part` of a file."""
    column = GROUPS.get(_place(name, part))
    if name != "mechanisms" and column is None:
        yield "", rows
        return

    def key(row: Row) -> str:
        return section_of(row) if column is None else str(row.get(column, ""))

    headings = sorted({key(row) for row in rows}) if column is None else list(dict.fromkeys(map(key, rows)))
    for heading in headings:
        yield heading, [row for row in rows if key(row) == heading]


def _table(rows: list[Row], here: str, name: str, drop: Container[str] = ()) -> list[str]:
    """Rows as a table with the columns that are shown of `name`; the others are folded below it."""
    shown, others = parted(rows, name, drop)
    parts = _whole(shown, here)
    if others:
        inside = "\n\n".join(_whole(others, here))
        parts.append('??? note "Settings and further figures"\n\n' + indent(inside, "    "))
    return parts


def _whole(rows: list[Row], here: str) -> list[str]:
    """Rows as a table; columns with long text become a list below it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    long = [key for key in columns if any(len(str(row.get(key) or "")) > LONG for row in rows)]
    table_rows = [
        ({"#": number} if long else {}) | {key: _linked(key, row.get(key), here) for key in columns if key not in long}
        for number, row in enumerate(rows, 1)
    ]
    parts = [table(table_rows)]
    for key in long:
        lines = [f"    {number}. `{_short(row[key])}`" for number, row in enumerate(rows, 1) if row.get(key)]
        parts.append(f'??? note "{key} of each row"\n\n' + "\n".join(lines))
    return parts


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"\s+", " ", text).replace("`", "'")


def _linked(key: str, value: Any, here: str) -> Any:
    if key in ("variant", "model", "becomes") and isinstance(value, str):
        name = value.removeprefix("xf_")
        if value in ("xformer", f"xf_{name}") and name in catalog.variants():
            return link(value, here, catalog.variant_page(name))
    return value


# ------------------------------------------------------------------------------------------------ rows about one thing


def measured(name: str, here: str) -> list[str]:
    """The section of a variant's page with its rows of all result files."""
    kind = name if name == "xformer" else f"xf_{name}"
    if kind == "xformer":
        return []
    return _rows_of(lambda row: row.get("variant", row.get("model")) == kind, here, ("variant", "model"))


def measured_objective(name: str, here: str) -> list[str]:
    """The section of an objective's page with its rows."""
    return _rows_of(lambda row: row.get("objective") == name, here, ("objective",))


def _rows_of(chosen: Callable[[Row], bool], here: str, drop: tuple[str, ...]) -> list[str]:
    parts = []
    for name in files():
        for part, rows in tables_of(name).items():
            found = [row for row in rows if chosen(row)]
            if found:
                place = _place(name, part)
                caption = result_tables().get(place, ResultTable()).caption
                parts += [f"### {said(name)[0]}", caption, *_table(found, here, place, drop), _more(name, here)]
    return ["## Measured", *parts] if parts else []


def _more(name: str, here: str) -> str:
    return f"{link('What was measured, and the other rows', here, page_of(name))}."
