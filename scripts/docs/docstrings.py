"""What mkdocstrings shows of docstrings: names in brackets, as [`Spec`], are links in transformers' tools alone."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAME = re.compile(r"\[(`[^`\]\n]+`)\](?![\[(])")


class PlainNames(griffe.Extension):
    """Takes the brackets away."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(r"\1", obj.docstring.value)
