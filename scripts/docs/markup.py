"""Markdown that the generated pages share: tables, cells, links between pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/hf-xformers/hf_xformers"

Pages = dict[str, str]  # path below the folder of pages -> text


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A Markdown table. columns: by default all that rows have, in the order of their first appearance."""
    rows = list(rows)
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(column)) for column in columns) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value as a table shows it: numbers with two decimals or three significant digits, absent ones empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return " ".join(str(value).split()).replace("|", "\\|")


def number(value: float) -> str:
    """Two decimals; more for what would vanish there, none for what is large."""
    if value == 0 or 0.1 <= abs(value) < 1000:
        return f"{value:.2f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.2g}"


def code(text: Any) -> str:
    """Inline code that holds in a table cell."""
    return "`" + str(text).replace("|", "\\|") + "`"


def literal(value: Any) -> str:
    """A default value as inline code, the way Python spells it but for the quotes of words."""
    if hasattr(value, "to_dict"):
        return code(value.type)
    return code(value if value != "" else '""')


def relative(source: str, target: str) -> str:
    """The link from one page to another; both are paths below the folder of pages."""
    path, mark, anchor = target.partition("#")
    return posixpath.relpath(path, posixpath.dirname(source) or ".") + mark + anchor


def link(text: str, source: str, target: str) -> str:
    return f"[{text}]({relative(source, target)})"


def source_link(path: str) -> str:
    """A link to a file of the repository."""
    return f"[`{path}`]({REPOSITORY}/blob/main/{path})"


def prose(text: str) -> str:
    """Plain text of a docstring as Markdown: what would be taken for markup outside code is kept as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*_<\[\]$])", r"\\\1", parts[index])
    return "".join(parts)


def page(title: str, *parts: str, description: str = "") -> str:
    """A page: its title and its parts, a blank line between them; parts that are empty stay out."""
    head = f"---\ndescription: {one_line(description)}\n---\n\n" if description else ""
    return head + "\n\n".join([f"# {title}", *(part for part in parts if part)]) + "\n"


def one_line(text: str) -> str:
    """Text as a quoted scalar of YAML."""
    return '"' + " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"') + '"'
