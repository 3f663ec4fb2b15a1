# SPDX-License-Identifier: Apache-2.0
"""What an objective says of itself: what it needs."""

from __future__ import annotations

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
    shape = {"seq2seq": "encoder-decoder"}.get(cls.shape, cls.shape)
    article = "an" if shape.startswith("e") else "a"
    tokens = [f"a {name} token" for name in cls.needed_tokens if name not in ("pad",)]
    try:
        tokens += ["sentinel tokens"] if build_objective(cls.type).num_sentinels else []
    except (TypeError, ValueError):  # a setting without a default
        pass
    beside = "" if cls.component is None else " and {} {!r}".format(*cls.component)
    parts = [f"{article} {shape} with For{cls.head}{beside}", ROWS.get(cls.rows, cls.rows)]
    return "; ".join([*parts, ", ".join(tokens)] if tokens else parts)
