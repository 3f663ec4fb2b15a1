"""Figures of the documentation's pages, from the files that the benchmarks wrote.

    python -m scripts.docs.figures      writes them into docs/, behind their comments, for readers of the checkout, all
                                        of model_cards/ and the start page of benchmarks/results/

A page has no figure that was typed. It names one in a comment, and `fill` puts it in place of the comment, and of what
was written behind it, when the pages are built:

    <!-- result: mechanisms; case=longformer, window 512; T=4096; column=time ratio; as=percent -->
    <!-- table: mechanisms; T=4096; case=luna / linear; columns=variant, case, time ratio; sort=time ratio -->
    <!-- machine: mechanisms -->

What follows the kind is a file of benchmarks/results without `.json`, with `/NAME` for its rows if they are not
called `rows`. Then come conditions on columns (`case=A / B` in a table: these rows, in this order, unless `sort` says
another) and

- result: `column`, whose value is shown; `as`: `percent`, or `times` (one divided by it); of several rows `count`,
  `least` or `most`;
- table: `columns`, with commas between them; `sort`, a column; `first`, how many rows; `links`, the folder of the zoo
  as the page sees it, to which variants then lead.

`length`, `time` and `memory` also stand for `T`, `time ratio` and `memory ratio`, where no column has these names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# A figure in a page: the comment that names it and, where it was written, the figure and the comment that ends it.
FIGURE = re.compile(r"<!--\s*(result|table|machine):\s*(.*?)\s*-->(?:((?!<!--).)*<!-- /\1 -->)?", flags=re.DOTALL)
_OF_MANY = {"count": len, "least": min, "most": max}  # `as` of several rows
_SHORT = {"length": "T", "time": "time ratio", "memory": "memory ratio"}
_MINUS = "\N{EN DASH}"  # in a cell of which there is nothing to say


def fill(markdown: str) -> str:
    """A page with its figures.

    Raises ValueError for a marker that names no file, no row or column, or, as `result`, several rows.
    """
    return FIGURE.sub(_figure, markdown)


def written(path: Path) -> str:
    """A page with its figures behind their comments. Variants in tables lead to their cards, which a checkout has."""
    cards = Path(os.path.relpath(ROOT / "model_cards", path.parent)).as_posix()

    def comment_and_figure(marker: re.Match[str]) -> str:
        figure = _figure(marker, cards)
        figure = f"\n\n{figure}\n\n" if marker[1] == "table" else figure
        return f"<!-- {marker[1]}: {marker[2]} -->{figure}<!-- /{marker[1]} -->"

    return FIGURE.sub(comment_and_figure, path.read_text(encoding="utf-8"))


def _figure(marker: re.Match[str], cards: str = "") -> str:
    kind, text = marker[1], " ".join(marker[2].split())
    source, *parts = re.split(r"\s*[;|]\s*", text)
    options = dict(_option(part, marker[0]) for part in parts)
    if cards and "links" in options:
        options["links"] = f"{cards}/xf_"
    try:
        if kind == "machine":
            return _machine(_content(source))
        rows = _rows(source)
        return _result(rows, options) if kind == "result" else _table(rows, options)
    except ValueError as error:
        raise ValueError(f"{error} (in `{' '.join(marker[0].split())}`)") from None


def _option(part: str, marker: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"{part!r} in `{marker}` is no NAME=VALUE")
    return name.strip(), value.strip()


@functools.cache
def _content(source: str) -> dict[str, Any]:
    path = RESULTS / f"{source.partition('/')[0]}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in RESULTS.glob("*.json")))
        raise ValueError(f"there are no results {path.stem!r}; there are {names}")
    return json.loads(path.read_text(encoding="utf-8"))


def _rows(source: str) -> list[dict[str, Any]]:
    name, _, part = source.partition("/")
    content, part = _content(name), part or "rows"
    if not isinstance(content.get(part), list):
        known = ", ".join(f"{name}/{key}" for key, value in content.items() if isinstance(value, list))
        raise ValueError(f"{name} has no rows {part!r}; it has {known}")
    return content[part]


def _chosen(rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The rows that fulfill all conditions; those of a condition with several values in the order of these."""
    found = list(rows)
    for name, wanted in conditions.items():
        column = _column(name, rows)
        values = wanted.split(" / ")
        missing = [value for value in values if not any(str(row.get(column)) == value for row in found)]
        if missing:
            raise ValueError(f"no row has {column}={missing[0]!r}")
        found = [row for value in values for row in found if str(row.get(column)) == value]
    return found


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The column called `name`, in short or in full."""
    known = {column for row in rows for column in row}
    for column in (name, _SHORT.get(name, name)):
        if column in known:
            return column
    raise ValueError(f"there is no column {name!r}; there are {', '.join(sorted(known))}")


def _result(rows: Sequence[Mapping[str, Any]], options: dict[str, str]) -> str:
    column, form = options.pop("column", ""), options.pop("as", "")
    found = _chosen(rows, options)
    if form in _OF_MANY:
        column = _column(column, rows)
        return _text(column, _OF_MANY[form]([row[column] for row in found if row.get(column) is not None]))
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows fit, and a figure is that of one")
    column = _column(column, rows)
    value = found[0].get(column)
    if value is None:
        raise ValueError(f"the row has no {column!r}")
    if form == "percent":
        return f"{value:.0%}".replace("%", " %")
    if form == "times":
        return f"{1 / value:.1f} times"
    if form:
        raise ValueError(f"as={form!r} is unknown; take percent or times, or of several rows {', '.join(_OF_MANY)}")
    return _text(column, value)


def _table(rows: Sequence[Mapping[str, Any]], options: dict[str, str]) -> str:
    """A Markdown table."""
    takes = {name: options.pop(name, "") for name in ("columns", "sort", "first", "links")}
    names = _column_names(takes["columns"], rows)
    found = _chosen(rows, options)
    if takes["sort"]:
        column = _column(takes["sort"], rows)
        if any(column not in row for row in found):
            raise ValueError(f"not all rows have the column {column!r} to sort by")
        found = sorted(found, key=lambda row: row[column])
    if takes["first"]:
        found = found[: int(takes["first"])]
    numbers = [all(isinstance(row.get(name), (int, float, type(None))) for row in found) for name in names]
    lines = [names, ["---:" if number else "---" for number in numbers]]
    lines += [[_cell(name, row.get(name), takes["links"]) for name in names] for row in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _column_names(text: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names with commas between them; a name may have a comma of its own."""
    names: list[str] = []
    parts = text.split(", ")
    while parts:
        for size in range(len(parts), 0, -1):
            with contextlib.suppress(ValueError):
                names.append(_column(", ".join(parts[:size]), rows))
                parts = parts[size:]
                break
        else:
            names.append(_column(parts[0], rows))  # raises
    return names


def _cell(column: str, value: Any, links: str) -> str:
    if column == "variant" and links:
        name = str(value).removeprefix("xf_")
        return name if name == "xformer" else f"[{name}]({links if links.endswith('_') else links + '/'}{name}.md)"
    if column in ("variant", "model"):
        return str(value).removeprefix("xf_")
    return _text(column, value)


def _text(column: str, value: Any) -> str:
    """A value as people read it: ratios and losses with two decimals, large numbers without any."""
    if value is None or value == "":
        return _MINUS
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and abs(value) < 0.01:
            return f"{value:.1g}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


def _machine(content: Mapping[str, Any]) -> str:
    """Where the figures of a file come from, in a sentence."""
    machine = content["machine"]
    threads = machine.get("threads")
    where = str(machine.get("device"))
    if threads is not None:
        where += f", {threads} thread{'s' * (threads != 1)}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "python") if name in machine)
    return f"Measured on {where}, with {versions}."


if __name__ == "__main__":
    import datasets

    from hf_xformers.hub import write_cards, write_objective_cards

    from .indexes import indexes

    datasets.disable_progress_bars()
    write_cards(ROOT / "model_cards", RESULTS)
    write_objective_cards(ROOT / "model_cards" / "objectives")
    pages = {ROOT / path: text for path, text in indexes().items()}
    pages |= {page: written(page) for page in sorted((ROOT / "docs").rglob("*.md"))}
    for page, text in pages.items():
        if not page.exists() or text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))
