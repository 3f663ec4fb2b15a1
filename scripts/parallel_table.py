#!/usr/bin/env python
"""Writes into docs/guides/devices.md which families each way of using many devices serves, as configs declare it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_xformers.core.parallel_plans import expert_parallel_plan, layers_apart, tensor_parallel_plan
from hf_xformers.core.sequence_parallel import why_not_sequence_parallel
from hf_xformers.variants import config_class, model_types

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "devices.md"
BEGIN, END = "<!-- families: scripts/parallel_table.py -->\n", "<!-- end -->\n"
SHAPES: tuple[dict[str, bool], ...] = ({}, {"is_decoder": True})


def shapes_of(model_type: str) -> list[Any]:
    """The config of a family as it is by default, and as a decoder, where it can be that."""
    found = []
    for shape in SHAPES:
        try:
            found.append(config_class(model_type)(**shape))
        except (TypeError, ValueError):
            continue
    return found


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('xf_')}`" for name in sorted(names))


def table() -> str:
    """The table's lines. A family stands where any of its forms does."""
    shapes = {name: shapes_of(name) for name in model_types() if name != "xformer"}
    plans = {name: [tensor_parallel_plan(config) or {} for config in configs] for name, configs in shapes.items()}
    heads = [name for name, found in plans.items() if any(key.endswith("q_proj") for plan in found for key in plan)]
    split = [name for name, found in plans.items() if any(found)]
    rows = {
        "tensor: heads, feed-forwards, token table": listed(heads),
        "tensor: feed-forwards and token table alone": listed([name for name in split if name not in heads]),
        "tensor: nothing": listed([name for name in shapes if name not in split]),
        "expert": listed([n for n, configs in shapes.items() if any(expert_parallel_plan(c) for c in configs)]),
        "sequence": listed(
            [n for n, configs in shapes.items() if any(not why_not_sequence_parallel(c) for c in configs)]
        ),
        "FSDP2, layer by layer": "all families, but for those of the next row",
        "FSDP2, the whole model gathered for a pass": listed(
            [name for name, configs in shapes.items() if not all(layers_apart(c) for c in configs)]
        ),
    }
    lines = ["| form | families |", "|---|---|", *(f"| {form} | {names} |" for form, names in rows.items())]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with today's table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
