# SPDX-License-Identifier: Apache-2.0
"""Tunes as text, made offline: a line of ABC notation each, and what it sounds like.

    write_tunes("tunes.txt", 600)          # to pretrain on: hf-xformers pretrain --data tunes.txt
    notes = notes_of("K:G G2 A B | c4 d4")  # what a model wrote, as pitches and lengths
    write_wav("tune.wav", sound_of(notes), 16000)

The notation is the common part of the ABC standard 2.1: `K:` names the key, whose sharps and flats are not written
again; C to B are the octave of middle C, c to b the next one, a comma is an octave down and an apostrophe one up; a
number is a length in eighths; z is a rest, | a bar line. Everything else is passed over, as a model may write it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples.sounds import sines

# Major keys: semitones of the tonic above C, and the letters that the key raises (+1) or lowers (-1).
KEYS = {
    "C": (0, {}),
    "G": (7, {"F": 1}),
    "D": (2, {"F": 1, "C": 1}),
    "F": (5, {"B": -1}),
    "Bb": (10, {"B": -1, "E": -1}),
}
_LETTERS = "CDEFGAB"
_NATURAL = dict(zip(_LETTERS, (0, 2, 4, 5, 7, 9, 11)))
_MIDDLE_C = 60  # as MIDI counts semitones
# Lengths of the notes of a bar, in eighths.
_RHYTHMS = ((2, 2, 2, 2), (1, 1, 2, 2, 2), (2, 1, 1, 2, 2), (4, 2, 2), (2, 2, 4), (3, 1, 2, 2), (1, 1, 1, 1, 4))
_NOTE = re.compile(r"K:(\S+)|([A-Ga-g])([',]*)(\d*)|z(\d*)")


def make_tune(seed: int) -> str:
    """A line of ABC: eight bars in the form A A' B B' A A' C and a long tonic. A is a walk over the scale, A'
    is A a step or two higher or lower, and C begins as A does, so later bars follow from earlier ones.

    Raises:
        ValueError: a negative seed, which Python's generator takes for the positive one.
    """
    if seed < 0:
        raise ValueError(f"A tune needs a seed of at least 0, got {seed}.")
    draw = random.Random(seed)
    key = draw.choice(sorted(KEYS))
    first, second = _walk(draw), _walk(draw)
    up, down = draw.choice((1, 2)), draw.choice((-2, -1))
    last = [*first[:2], *((step - 1, length) for step, length in first[2:])]
    bars = [first, _moved(first, up), second, _moved(second, down), first, _moved(first, up), last, [(0, 8)]]
    return (
        f"K:{key} " + " | ".join(" ".join(_written(step, length, key) for step, length in bar) for bar in bars) + " |]"
    )


def _walk(draw: random.Random) -> list[tuple[int, int]]:
    """A bar as (degree of the scale, length)."""
    step, bar = draw.choice((0, 2, 4)), []
    for length in draw.choice(_RHYTHMS):
        bar.append((step, length))
        step = min(max(step + draw.choice((-2, -1, 1, 1, 2)), -3), 9)
    return bar


def _moved(bar: Sequence[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    return [(step + steps, length) for step, length in bar]


def _written(step: int, length: int, key: str) -> str:
    """A degree above the tonic, which lies in the octave of middle C, as ABC has it."""
    octave, place = divmod(_LETTERS.index(key[0]) + step, 7)
    letter = _LETTERS[place]
    if octave >= 1:
        letter = letter.lower() + "'" * (octave - 1)
    return letter + "," * max(-octave, 0) + (str(length) if length != 1 else "")


def tunes(count: int, seed: int = 0) -> Iterator[str]:
    """Different tunes, each by a seed of its own."""
    made: set[str] = set()
    number = seed * 1_000_003
    while len(made) < count:
        tune = make_tune(number)
        number += 1
        if tune not in made:
            made.add(tune)
            yield tune


def write_tunes(path: str | Path, count: int, seed: int = 0) -> None:
    """Writes tunes to a text file, a line each."""
    Path(path).write_text("".join(tune + "\n" for tune in tunes(count, seed)), encoding="utf-8")


def notes_of(text: str) -> list[tuple[int | None, int]]:
    """(pitch in semitones as MIDI counts them, or None of a rest; length in eighths) of every note of a text."""
    signs: dict[str, int] = {}
    found: list[tuple[int | None, int]] = []
    for key, letter, octaves, length, rest in _NOTE.findall(text):
        if key:
            signs = KEYS.get(key, (0, {}))[1]
        elif letter:
            pitch = _MIDDLE_C + _NATURAL[letter.upper()] + signs.get(letter.upper(), 0)
            pitch += 12 * (letter.islower() + octaves.count("'") - octaves.count(","))
            found.append((pitch, _length(length)))
        else:
            found.append((None, _length(rest)))
    return found


def _length(written: str) -> int:
    return min(int(written or 1), 16) or 1


def sound_of(notes: Sequence[tuple[int | None, int]], rate: int = 16000, eighth: float = 0.18) -> np.ndarray:
    """Samples [N] of notes as sine tones with two overtones that fade, `eighth` seconds to an eighth."""
    pieces = [np.zeros(1)]
    for pitch, length in notes:
        seconds = length * eighth
        if pitch is None:
            pieces.append(np.zeros(round(seconds * rate)))
            continue
        frequency = 440.0 * 2.0 ** ((pitch - 69) / 12)
        tone = np.sum([sines([frequency * partial], seconds, rate) / partial**2 for partial in (1, 2, 3)], axis=0)
        pieces.append(0.5 * tone * np.exp(-2.0 * np.arange(len(tone)) / rate))
    return np.concatenate(pieces)


__all__ = ["KEYS", "make_tune", "notes_of", "sound_of", "tunes", "write_tunes"]
