"""Which keyword arguments a model reads: an argument that nothing reads is an error, not silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.utils.generic import TransformersKwargs

# What transformers and Trainer, `generate` or a data collator may hand to any model, read or not.
_COMMON = frozenset(TransformersKwargs.__annotations__) | {
    "return_dict",
    "cache_position",
    "shift_labels",  # labels that sequence parallelism has shifted
    "logits_to_keep",
}


def refuse_unread(model_type: str, given: Mapping[str, Any], read: Iterable[str], named: Iterable[str]) -> None:
    """Checks the keyword arguments `given` to a model beside those that its `forward` names.

    read: names that its components read. named: those of `forward`, for the message. None counts as not given.

    Raises:
        TypeError: no component reads one of them.
    """
    if not given:
        return
    read = set(read)
    for name, value in given.items():
        if value is None or name in read or name in _COMMON:
            continue
        valid = sorted({*read, *named} - {"kwargs", "self"})
        close = difflib.get_close_matches(name, [*valid, "output_attentions", "output_hidden_states"], n=1, cutoff=0.4)
        hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(valid)}."
        raise TypeError(f"No component of this {model_type!r} model reads the argument `{name}`; {hint}")
