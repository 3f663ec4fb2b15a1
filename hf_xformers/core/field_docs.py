# SPDX-License-Identifier: Apache-2.0
"""What the fields of a dataclass mean, read from its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re

_ARGS = re.compile(r"^Args:\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*)(?: \(.*?\))?:\s", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(?:^|(?<=[.;\n)] )|(?<=\n))((?:\w+,\s)*\w+):\s")


def meanings(cls: type) -> dict[str, str]:
    """What the fields of a dataclass mean: the entries of `Args:` in its docstring and its bases', `field: meaning` or
    `field (type): meaning`, and sentences behind `field: ` elsewhere in them."""
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        text = inspect.cleandoc(owner.__doc__ or "") + "\n"
        sections = [match[1] for match in _ARGS.finditer(text)]
        for part, pattern in [*((section, _ENTRY) for section in sections), (_ARGS.sub("\n", text), _SENTENCE)]:
            heads = list(pattern.finditer(part))
            if pattern is _SENTENCE:  # any sentence may have a colon
                heads = [head for head in heads if names.issuperset(re.split(r",\s", head[1]))]
            for head, following in zip(heads, [*heads[1:], None]):
                end = len(part) if following is None else following.start()
                meaning = " ".join(part[head.end() : end].split("\n\n")[0].split())
                for name in re.split(r",\s", head[1]):
                    found.setdefault(name, re.sub(r"(?<!\.)[.;]$", "", meaning))
    return found
