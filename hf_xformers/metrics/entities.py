"""Precision, recall and F1 of whole entities in tag sequences, as conlleval and seqeval count them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TAG = re.compile(r"[BIESLU]-.+")


def is_entity_tag(tag: str) -> bool:
    """Whether a tag marks a part of an entity (`B-PER`), or the outside (`O`)."""
    return tag == "O" or _TAG.fullmatch(tag) is not None


def entities_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first, last position) of every entity of a sequence in IOB1, IOB2 or IOBES.

    Also ill-formed sequences have an answer, the one of conlleval: an entity begins at B and S, at I or E after the
    outside, after an end, or after another type, and lasts as long as none begins and the outside is not reached.
    """
    found: list[tuple[str, int, int]] = []
    begin = 0
    before, kind = "O", ""
    for position, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        inside = mark != "O"
        begins = inside and (mark in "BS" or before in "OES" or name != kind)
        if before != "O" and (begins or not inside):
            found.append((kind, begin, position - 1))
        if begins:
            begin = position
        before, kind = mark, name
    return found


def entity_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """`overall_precision`, `overall_recall`, `overall_f1` over all entities (micro), `overall_accuracy` over tokens.

    An entity is right when its type and both ends are. Raises ValueError for sequences of different lengths.
    """
    right = predicted = true = equal = tokens = 0
    for row, (guess, gold) in enumerate(zip(predictions, references)):
        if len(guess) != len(gold):
            raise ValueError(f"row {row} has {len(guess)} predicted tags for {len(gold)} true ones")
        ours, theirs = set(entities_of(guess)), set(entities_of(gold))
        right += len(ours & theirs)
        predicted += len(ours)
        true += len(theirs)
        equal += sum(a == b for a, b in zip(guess, gold))
        tokens += len(gold)
    precision = right / predicted if predicted else 0.0
    recall = right / true if true else 0.0
    return {
        "overall_precision": precision,
        "overall_recall": recall,
        "overall_f1": 2 * precision * recall / (precision + recall) if right else 0.0,
        "overall_accuracy": equal / tokens if tokens else 0.0,
    }
