# SPDX-License-Identifier: Apache-2.0
"""Options of a command as dataclasses: which of them somebody has given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults; one without a default is always given."""
    found = {}
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(options, field.name)
        if value != default:
            found[field.name] = value
    return found


def refuse_alone(options: Any, names: Iterable[str], company: str) -> None:
    """Raises ValueError for an option that has no effect without another one, which is not there.

    options: a dataclass. names: its fields. company: the missing option, in words.
    """
    given = changed(options)
    for name in names:
        if name in given:
            raise ValueError(f"--{name} {given[name]} has no effect without {company}; give both, or leave it out")
