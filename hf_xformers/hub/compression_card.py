# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's card says of its compression: what was done, step by step, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.saved_files import read_object

FILE = "compression.json"


def compression_sections(folder: Path) -> list[str]:
    """Markdown: a table with a row for each step. Raises `ValueError` for an account that is damaged."""
    path = folder / FILE
    steps = read_object(path).get("steps") if path.is_file() else []
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"{str(path)!r} is no account of a compression; remove it, or copy it again")
    if not steps:
        return []
    lines = ["| step | parameters | not zero | MB on disk | quality |", "|---|---|---|---|---|"]
    rows = [("before", steps[0]["before"]), *((_what(step), step["after"]) for step in steps)]
    for what, row in rows:
        megabytes = f"{row['bytes'] / 1e6:.2f}" if row.get("bytes") else ""
        lines.append(f"| {what} | {row['parameters']:,} | {row['nonzero']:,} | {megabytes} | {_quality(row)} |")
    return ["## Compression", "\n".join(lines)]


def _what(step: Mapping[str, Any]) -> str:
    settings = step.get("settings") or {}
    method = settings.get("method")  # a name, or a spec with all its settings
    chosen = (method.get("type") if isinstance(method, dict) else method, settings.get("by"))
    parts = [str(name) for name in chosen if name]
    return f"`{step['command']}`" + (f": {' by '.join(parts)}" if parts else "")


def _quality(row: Mapping[str, Any]) -> str:
    if row.get("quality") is None:
        return ""
    baseline = row.get("baseline", row.get("floor"))  # the name in earlier files
    return f"{row.get('metric')} {row['quality']:.4g}" + ("" if baseline is None else f" (baseline {baseline:.4g})")
