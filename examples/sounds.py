# SPDX-License-Identifier: Apache-2.0
"""Sounds that are made offline: words spelt in tones, with the transcript known, and WAV files by Python itself."""

from __future__ import annotations

import json
import random
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# The words that are spelt where nobody names others.
WORDS = ("ab", "ace", "bad", "bed", "cab", "dad", "deed", "ebb")
# A letter is two tones at once: one of each group (hertz), as telephones dial.
LOW, HIGH = (697.0, 770.0, 852.0, 941.0, 1040.0), (1209.0, 1336.0, 1477.0, 1633.0, 1805.0, 1995.0)


def write_wav(path: str | Path, samples: np.ndarray, rate: int) -> None:
    """Writes samples [N] in [-1, 1], beyond which they are cut, as 16 bits of one channel."""
    whole = np.round(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(whole.tobytes())


def sines(frequencies: Sequence[float], seconds: float, rate: int) -> np.ndarray:
    """The mean of sine tones (hertz), faded in and out over 5 ms, which spares a click."""
    times = np.arange(round(seconds * rate)) / rate
    edge = np.minimum(np.minimum(times, seconds - times) / 0.005, 1.0).clip(0.0, 1.0)
    found = sum((np.sin(2 * np.pi * frequency * times) for frequency in frequencies), np.zeros(len(times)))
    return found * edge / max(len(frequencies), 1)


def chord_of(letter: str) -> tuple[float, float]:
    """The two tones of a letter from a to z. Raises ValueError for another character."""
    number = ord(letter) - ord("a")
    if not 0 <= number < 26:
        raise ValueError(f"{letter!r} has no tones: they spell the letters from a to z")
    return LOW[number % len(LOW)], HIGH[number // len(LOW) % len(HIGH)]


def spell_in_tones(text: str, rate: int, seed: int, noise: float = 0.05) -> np.ndarray:
    """A text of words in tones, [N]: of every letter its [`chord_of`] for 70 to 100 ms and a gap of 30 ms, between
    words a pause of 100 ms, all in white noise of this deviation. Lengths, loudness and noise follow from the seed."""
    draw = random.Random(f"{seed} {text}")
    pieces = [np.zeros(round(draw.uniform(0.02, 0.1) * rate))]
    for character in text:
        if character == " ":
            pieces.append(np.zeros(round(0.1 * rate)))
            continue
        pieces += [draw.uniform(0.5, 1.0) * sines(chord_of(character), draw.uniform(0.07, 0.1), rate)]
        pieces.append(np.zeros(round(0.03 * rate)))
    sound = np.concatenate(pieces)
    hiss = np.random.default_rng(draw.getrandbits(64)).normal(0.0, noise, len(sound))
    return 0.5 * sound + hiss


def write_tone_speech(
    folder: str | Path,
    count: int,
    *,
    seed: int = 0,
    rate: int = 8000,
    words: Sequence[str] = WORDS,
    most_words: int = 3,
    noise: float = 0.05,
) -> Path:
    """Writes `count` sounds of up to `most_words` words each to a folder, and `metadata.jsonl` with their transcripts,
    which `hf-xformers finetune --task speech-recognition --data FOLDER` reads. Returns the table's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(seed), []
    for number in range(count):
        text = " ".join(draw.choices(words, k=draw.randint(1, most_words)))
        write_wav(folder / f"{number}.wav", spell_in_tones(text, rate, seed * 1_000_003 + number, noise), rate)
        rows.append({"audio": f"{number}.wav", "text": text})
    table = folder / "metadata.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table


__all__ = ["WORDS", "chord_of", "sines", "spell_in_tones", "write_tone_speech", "write_wav"]
