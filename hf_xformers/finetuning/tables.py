# SPDX-License-Identifier: Apache-2.0
"""One table of rows from one file: CSV, TSV, JSON, JSONL or Parquet. What a lenient reader would guess at is refused,
with the number of the line."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.delimited import check_fields, decoded_lines, encoding, table_options
from ..data.local_files import format_of
from ..data.quiet import errors_told_elsewhere
from .origin import with_origins

if TYPE_CHECKING:
    from datasets import Dataset

TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def read_table(path: Path, column_names: Sequence[str] = ()) -> Dataset:
    """The rows of a file, each with its place (`origin`).

    column_names: of CSV or TSV files without a header line. TSV fields stand as they are, without quotes.

    Raises:
        ValueError: text that is not UTF-8, a line with more or fewer fields than the header, a quote without end, a
            column named twice, another delimiter, JSON that is no table of objects, or a file without rows.
    """
    kind = format_of(path)
    if kind in ("csv", "tsv"):
        return _read_delimited(path, kind, column_names)
    if kind == "json":
        articles = _articles(path)
        return _load("json", path) if articles is None else squad_rows(articles, path.name)
    return _with_numbers(_load(str(kind), path), path, "row")


# ------------------------------------------------------------------------------------------------ CSV and TSV


def _read_delimited(path: Path, kind: str, column_names: Sequence[str]) -> Dataset:
    lines = check_fields(path, kind, column_names=column_names, quotes=kind == "csv")
    options = table_options()
    if kind == "tsv":
        options |= {"sep": "\t", "quoting": csv.QUOTE_NONE}
    if column_names:
        options |= {"names": list(column_names), "header": None}
    rows = _load("csv", path, **options)
    return with_origins(rows, [f"{path.name!r}, line {line}" for line in lines])


# ------------------------------------------------------------------------------------------------ JSON


def _articles(path: Path) -> list[Any] | None:
    """The articles of a file in SQuAD's own form; None for a table of another type, whose rows are read by `_load`.

    Raises ValueError for JSON that holds no rows.
    """
    if path.suffix.lower() != ".json":
        return None
    try:
        content = json.loads("".join(decoded_lines(path)))
    except json.JSONDecodeError:
        return None  # lines of objects, or damaged, which the reader says better
    if not isinstance(content, (dict, list)) or not content:
        raise ValueError(f"{str(path)!r} holds no rows but {content!r}; give a list of objects, or an object per line")
    articles = content.get("data") if isinstance(content, dict) else content
    if isinstance(articles, list) and articles and _is_article(articles[0]):
        return articles
    rows = content if isinstance(content, list) else [content]
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise ValueError(
            f"{str(path)!r} holds a list with {str(wrong)[:40]!r} in it; give a list of objects, or an object per line"
        )
    tables = [
        name for name, value in rows[0].items() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    if len(rows) == 1 and tables and isinstance(content, dict):
        raise ValueError(
            f"{str(path)!r} is one object, which holds lists of objects under {', '.join(map(repr, tables))}; save"
            " each list of rows in a file of its own"
        )
    return None


def _is_article(entry: Any) -> bool:
    return isinstance(entry, dict) and "paragraphs" in entry


def squad_rows(articles: Sequence[Any], name: str) -> Dataset:
    """SQuAD's own JSON, articles of paragraphs of questions, as a row per question."""
    from datasets import Dataset

    found: list[dict[str, Any]] = []
    origins: list[str] = []
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = entry.get("answers") or []
                    texts, starts = [a["text"] for a in answers], [a["answer_start"] for a in answers]
                    found.append(
                        {
                            "id": str(entry.get("id", len(found))),
                            "question": entry["question"],
                            "context": paragraph["context"],
                            "answers": {"text": texts, "answer_start": starts},
                        }
                    )
                    origins.append(f"{name!r}, question {found[-1]['id']}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{name!r} holds articles of paragraphs as SQuAD has them, but after {len(found)} questions one is without"
            f" {error}; every paragraph needs `context` and `qas`, every question `question` and `answers`"
        ) from error
    return with_origins(Dataset.from_list(found), origins)


# ------------------------------------------------------------------------------------------------ common steps


def _load(kind: str, path: Path, **options: Any) -> Dataset:
    import datasets

    if kind == "json" and not any(line.strip() for line in decoded_lines(path)):
        raise ValueError(f"{str(path)!r} holds nothing but blank lines; give a file that holds rows, or leave it out")
    options |= {} if kind == "parquet" else {"encoding": encoding()}
    try:
        with errors_told_elsewhere():
            rows = datasets.load_dataset(kind, data_files={"train": glob.escape(str(path))}, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        where = _broken_line(path) if kind == "json" else None
        form = kind if kind == "parquet" else f"{encoding().upper()} {kind}"
        raise ValueError(
            f"{str(path)!r} could not be read as {form} ({where or reason}); correct the file, or give it the"
            " suffix of its format"
        ) from error
    return _with_numbers(rows, path, "line") if kind == "json" else rows


def _with_numbers(rows: Dataset, path: Path, unit: str) -> Dataset:
    if unit == "line":
        numbers = [number for number, line in enumerate(decoded_lines(path), start=1) if line.strip()]
        if len(numbers) == len(rows):
            return with_origins(rows, [f"{path.name!r}, line {number}" for number in numbers])
    return with_origins(rows, [f"{path.name!r}, row {number}" for number in range(1, len(rows) + 1)])


def _broken_line(path: Path) -> str | None:
    """What is wrong with the first line of a JSONL file that is not an object; None where all are, or it is one
    value."""
    for number, line in enumerate(decoded_lines(path), start=1):
        try:
            value = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            return f"line {number} is no JSON: {error.msg}"
        if not isinstance(value, dict):
            return f"line {number} is no object: {line.strip()[:40]}"
    return None
