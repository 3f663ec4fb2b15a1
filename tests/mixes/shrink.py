"""Makes a failing mix small: leaves out whatever it fails without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.mixes.check import Checker, Outcome
from tests.mixes.draw import FLAGS, GEOMETRY, Mix


def shrink(mix: Mix, outcome: Outcome, checker: Checker, most: int = 60) -> Mix:
    """A smaller mix with the same outcome, after at most `most` trials."""
    trials = 0
    again = True
    while again:
        again = False
        for smaller in _smaller(mix):
            trials += 1
            if trials > most:
                return mix
            if checker(smaller).kind == outcome.kind:
                mix, again = smaller, True
                break
    return mix


def _smaller(mix: Mix) -> Iterator[Mix]:
    fixed = {*GEOMETRY, *FLAGS[mix.shape]}
    for name, value in mix.fields.items():
        if name in fixed:
            if name in GEOMETRY and GEOMETRY[name] != value:
                yield replace(mix, fields={**mix.fields, name: GEOMETRY[name]})
            continue
        yield replace(mix, fields={key: entry for key, entry in mix.fields.items() if key != name})
        for inner in _inner(value):
            yield replace(mix, fields={**mix.fields, name: inner})


def _inner(value: Any) -> Iterator[Any]:
    """`value` with one entry less, at any depth."""
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        if key != "type":
            yield {other: copy.copy(kept) for other, kept in value.items() if other != key}
            for smaller in _inner(entry):
                yield {**value, key: smaller}
