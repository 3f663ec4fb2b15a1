"""What the fields of configs, components and objectives mean, as tables: name, default, meaning."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.core.components import SLOTS, field_aliases
from hf_xformers.core.field_docs import meanings
from hf_xformers.core.specs import default_of

from .markup import code, literal, prose, table


def spec_fields(cls: type, values: Any = None, only: set[str] | None = None) -> str:
    """The fields of a spec class as a table; empty where it has none. values: a spec whose values are shown in place
    of the defaults. only: fields that are shown."""
    explained, aliases = meanings(cls), field_aliases(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        also = [alias for alias, name in aliases.items() if name == field.name]
        given = getattr(values, field.name) if values is not None else default_of(cls, field.name)
        needed = field.default is field.default_factory is dataclasses.MISSING
        rows.append(
            {
                "field": code(field.name) + "".join(f" (or {code(alias)})" for alias in also),
                "default": "required" if needed and values is None else literal(given),
                "meaning": prose(explained.get(field.name, "")),
            }
        )
    return table(rows) if rows else ""


def config_fields(cls: Any, names: list[str] | None = None) -> str:
    """Fields of a config (by default all but the slots) as a table."""
    explained = config_meanings(cls)
    rows = [
        {
            "field": code(field.name),
            "default": literal(default_of(cls, field.name)),
            "meaning": prose(explained.get(field.name, "")),
        }
        for field in dataclasses.fields(cls)
        if (field.name in names if names is not None else field.name in explained and field.name not in SLOTS)
    ]
    return table(rows) if rows else ""


@functools.cache
def config_meanings(cls: Any) -> dict[str, str]:
    """What a config's fields mean: the variant's own as its docstring says, the others as that of `XFormerConfig`."""
    own = {} if cls is XFormerConfig else _of_bases(cls)
    return {**meanings(XFormerConfig), **own}


def _of_bases(cls: Any) -> dict[str, str]:
    general = {field.name for field in dataclasses.fields(XFormerConfig)}
    return {name: text for name, text in meanings(cls).items() if name not in general}
