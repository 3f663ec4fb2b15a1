# SPDX-License-Identifier: Apache-2.0
"""Options as typed values: text from the command line, or a YAML value, to what a field's annotation says."""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from typing import Any, Literal

import yaml

NONE_WORDS = ("none", "null", "")
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
_NO_FIT = object()


def annotation(cls: type, name: str) -> Any:
    """The annotation of a dataclass field, resolved where the class that declares it stands; Any if that fails."""
    for owner in cls.__mro__:
        found = inspect.get_annotations(owner).get(name)
        if found is None:
            continue
        if isinstance(found, str):
            try:
                found = eval(found, dict(vars(sys.modules[owner.__module__])))
            except (NameError, TypeError, AttributeError):
                return Any
        return found
    return Any


def parse(value: Any, hint: Any, option: str) -> Any:
    """`value` as the annotation `hint` wants it.

    Text is read as a number, truth value, none/null, JSON list or dict where the annotation allows one; a list may
    also be written 1,2,3. Values that are typed already (from YAML) keep their type, but for int given as float.

    Raises ValueError that names the option and what it takes.
    """
    for candidate in _alternatives(hint):
        fitted = _fit(value, candidate)
        if fitted is not _NO_FIT:
            return fitted
    raise ValueError(f"argument {option}: {value!r} is no valid value; it takes {describe(hint)}")


def describe(hint: Any) -> str:
    """An annotation in words."""
    words = []
    for candidate in _alternatives(hint):
        if typing.get_origin(candidate) is Literal:
            words += [repr(choice) for choice in typing.get_args(candidate)]
        elif candidate is type(None):
            words.append("none")
        else:
            kind = typing.get_origin(candidate) or candidate
            words.append(
                {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
                    kind, "a list such as 1,2,3" if kind in (list, tuple) else "a mapping in JSON"
                )
            )
    unique = list(dict.fromkeys(words))
    return " or ".join(unique)


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, those first that accept less: None, bool, choices, int, float, containers, str."""
    if hint is Any:
        return [Any]
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    flat: list[Any] = []
    for member in members:
        flat += _alternatives(member) if typing.get_origin(member) in (typing.Union, types.UnionType) else [member]
    if float in flat and int in flat:  # the wider one alone says enough, and an int stays an int
        flat.remove(float)
        flat.insert(flat.index(int) + 1, float)
    order = {type(None): 0, bool: 1, int: 3, float: 4, str: 6}
    return sorted(flat, key=lambda kind: order.get(kind, 2 if typing.get_origin(kind) is Literal else 5))


def _fit(value: Any, kind: Any) -> Any:
    if kind is Any:
        return _free(value)
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return next((choice for choice in typing.get_args(kind) if value == choice or value == str(choice)), _NO_FIT)
    if kind is type(None):
        return None if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS) else _NO_FIT
    if kind is bool:
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        return value if isinstance(value, bool) else _NO_FIT
    if kind in (int, float):
        return _number(value, kind)
    if origin in (list, tuple):
        return _sequence(value, kind, origin)
    if origin is dict:
        value = _json(value) if isinstance(value, str) else value
        return value if isinstance(value, dict) else _NO_FIT
    if kind is str:
        return value if isinstance(value, str) else _NO_FIT
    return _free(value)  # an annotation that no option of ours uses: the component checks the value itself


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _NO_FIT
    if isinstance(value, float) and kind is int:
        return _NO_FIT
    try:
        return kind(value)
    except ValueError:
        return _NO_FIT


def _sequence(value: Any, kind: Any, origin: type) -> Any:
    if isinstance(value, str):
        parsed = _json(value)
        value = parsed if isinstance(parsed, list) else [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple)):
        return _NO_FIT
    inner = [entry for entry in typing.get_args(kind) if entry is not Ellipsis]
    if not inner:
        return origin(value)
    kinds = inner if len(inner) == len(value) else [inner[0]] * len(value)
    items = []
    for item, wanted in zip(value, kinds):
        fits = [fitted for option in _alternatives(wanted) if (fitted := _fit(item, option)) is not _NO_FIT]
        if not fits:
            return _NO_FIT
        items.append(fits[0])
    return origin(items)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _free(value: Any) -> Any:
    """Text without an annotation: as YAML reads it."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
