# SPDX-License-Identifier: Apache-2.0
"""Long documents in parts: divided once into training and validation text, and cut into pieces that a tokenizer can
take."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_PIECE = 2**20  # characters; a tokenizer holds some hundred bytes for each while it works


def divide(text: str, fraction: float) -> tuple[str, str]:
    """(the text but its last part, its last part of about `fraction`), which joined are the text.

    The cut is at the end of a paragraph, else of a line, else of a word: the last one that leaves the second part at
    least `fraction` and at most half as much again, else the nearest. Both are empty or blank only where nothing
    divides the text.
    """
    wanted = min(max(1, round(len(text) * (1 - fraction))), len(text))
    lowest = max(1, round(len(text) * (1 - 1.5 * fraction)))
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, lowest, wanted + 1)
        if found >= 0 and _both(text, found + len(mark)):
            return text[: found + len(mark)], text[found + len(mark) :]
    places = [text.rfind(" ", 0, wanted), text.rfind("\n", 0, wanted), text.find(" ", wanted), text.find("\n", wanted)]
    able = [place + 1 for place in places if place >= 0 and _both(text, place + 1)]
    if not able:
        return text, ""
    cut = min(able, key=lambda place: abs(place - wanted))
    return text[:cut], text[cut:]


def _both(text: str, cut: int) -> bool:
    return bool(text[:cut].strip()) and bool(text[cut:].strip())


def pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """A text in parts of at most `longest` characters, which joined are the text.

    Cuts are before white space that follows a word: there the words on both sides are the same as in the whole text,
    for every tokenizer of this package.
    """
    start = 0
    while len(text) - start > longest:
        cut = start + longest
        while cut > start and not (text[cut].isspace() and not text[cut - 1].isspace()):
            cut -= 1
        cut = cut if cut > start else start + longest  # nothing but one word
        yield text[start:cut]
        start = cut
    yield text[start:]
