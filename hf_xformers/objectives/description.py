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
    parts = [f"{article} {shape} with For{cls.head}", ROWS.get(cls.rows, cls.rows)]
    return "; ".join([*parts, ", ".join(tokens)] if tokens else parts)


def setting_meanings(cls: type[Objective]) -> dict[str, str]:
    """What the fields mean: of the docstrings of the class and its bases, lines that begin with a field's name and two
    spaces and go on below, or sentences behind `field: `."""
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        current, text = None, inspect.cleandoc(owner.__doc__ or "")
        own: dict[str, list[str]] = {}
        for line in text.splitlines():
            match = re.match(r"(\w+)(?: {2,}| )(\S.*)", line)
            if match and match[1] in names and (f"{match[1]}  " in line or line.startswith(f"{match[1]} ")):
                current = match[1]
                own[current] = [match[2]]
            elif current and line.startswith("    "):
                own[current].append(line.strip())
            else:
                current = None
        for name in names:
            said = re.search(rf"(?:^|[.\s]){name}: (.*?)(?=\.\s+\w+: |\Z)", text, re.DOTALL)
            if said and name not in own:
                own[name] = [" ".join(said[1].split())]
        for name, lines in own.items():
            found.setdefault(name, " ".join(lines))
    return found


__all__ = ["ROWS", "needs", "setting_meanings"]
