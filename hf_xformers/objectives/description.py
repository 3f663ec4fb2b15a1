# SPDX-License-Identifier: Apache-2.0
"""What an objective says of itself: what it needs, and what its settings mean."""

from __future__ import annotations

import dataclasses
import inspect
import re

from .base import Objective, build_objective

ROWS = {
    "blocks": "text packed in rows of equal length",
    "sentences": "whole sentences of documents",
    "segment_pairs": "documents of several sentences, paired in segments",
    "parallel": "sentences and their translations",
    "images": "images of one size",
}


def needs(cls: type[Objective]) -> str:
    """What an objective needs of model, text and tokenizer, in a line."""
    article = "an" if cls.shape == "encoder" else "a"
    shape = {"seq2seq": "encoder-decoder"}.get(cls.shape, cls.shape)
    article = "an" if shape.startswith("e") else article
    tokens = [f"a {name} token" for name in cls.needed_tokens if name not in ("pad",)]
    try:
        tokens += ["sentinel tokens"] if build_objective(cls.type).num_sentinels else []
    except (TypeError, ValueError):  # a setting without a default
        pass
    beside = "" if cls.component is None else " and {} {!r}".format(*cls.component)
    parts = [f"{article} {shape} with For{cls.head}{beside}", ROWS.get(cls.rows, cls.rows)]
    return "; ".join([*parts, ", ".join(tokens)] if tokens else parts)


def setting_meanings(cls: type[Objective]) -> dict[str, str]:
    """What the fields mean: of the docstrings of the class and its bases, lines that begin with the names of
    fields and continue below, or sentences behind `field: `."""
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        current: list[str] = []
        text, own = inspect.cleandoc(owner.__doc__ or ""), dict[str, list[str]]()
        for line in text.splitlines():
            match = re.match(r"(\w+(?:, \w+)*) +(\S.*)", line)
            if match and names.issuperset(match[1].split(", ")):
                current = match[1].split(", ")
                own.update((name, [match[2]]) for name in current)
            elif line.startswith("    "):
                for name in current:
                    own[name].append(line.strip())
            else:
                current = []
        for name in names:
            said = re.search(rf"(?:^|[.\s]){name}: (.*?)(?=\.\s+\w+: |\Z)", text, re.DOTALL)
            if said and name not in own:
                own[name] = [" ".join(said[1].split())]
        for name, lines in own.items():
            found.setdefault(name, " ".join(lines))
    return found


__all__ = ["ROWS", "needs", "setting_meanings"]
