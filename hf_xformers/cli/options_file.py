# SPDX-License-Identifier: Apache-2.0
"""Options of a command from a YAML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

_YAML_SUFFIXES = (".yaml", ".yml", ".json")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Truth values and whole numbers as YAML 1.2 has them: `no`, `2024-01-01`, `12:30` and `010` are texts, which
    options read as they do on a command line."""

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern) for tag, pattern in known if tag not in (f"{_TAG}bool", f"{_TAG}int", f"{_TAG}timestamp")
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile("[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))


def take_file(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of a YAML (or JSON) file named as the first argument, and the other arguments.

    Raises ValueError for a missing file, one that cannot be parsed, or one that is no mapping.
    """
    if not argv or argv[0].startswith("-") or not argv[0].endswith(_YAML_SUFFIXES):
        return {}, list(argv)
    path = Path(argv[0]).expanduser()
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(
            f"the configuration file {argv[0]!r} cannot be read: {error.strerror}; correct the path"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"the configuration file {argv[0]!r} is not UTF-8; save it in that encoding") from None
    except yaml.YAMLError as error:
        raise ValueError(f"the configuration file {argv[0]!r} is no valid YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(
            f"the configuration file {argv[0]!r} must hold `option: value` lines, not a {type(content).__name__}"
        )
    return {str(key): value for key, value in content.items()}, list(argv[1:])


def file_tokens(
    options: Mapping[str, Any], groups: Iterable[str], parser: HfArgumentParser | None = None
) -> list[str]:
    """The command line that says the same as a file's options."""
    groups = set(groups)
    lists = (
        set()
        if parser is None
        else {flag for flag, action in parser._option_string_actions.items() if action.nargs == "+"}
    )
    tokens: list[str] = []
    for key, value in options.items():
        flag = f"--{key}"
        if key in groups and isinstance(value, Mapping):
            for field, entry in _flat(value):
                tokens.append(f"{flag}={_text(entry)}" if field == "type" else f"{flag}.{field}={_text(entry)}")
        elif flag in lists and isinstance(value, (list, tuple)):
            tokens += [flag, *map(_text, value)]
        elif value is not None or key not in _optional_in(parser):
            tokens.append(f"{flag}={_text(value)}")
    return tokens


def _optional_in(parser: HfArgumentParser | None) -> set[str]:
    """Options of the parser's dataclasses: `null` in a file leaves them at their default."""
    types = [] if parser is None else parser.dataclass_types
    return {field.name for cls in types for field in dataclasses.fields(cls)}


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as dotted names; the name of a nested component stands under its own path."""
    pairs: list[tuple[str, Any]] = []
    for key, entry in value.items():
        path = prefix if key == "type" and prefix else f"{prefix}.{key}" if prefix else str(key)
        pairs += _flat(entry, path) if isinstance(entry, Mapping) else [(path, entry)]
    return pairs


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value)
