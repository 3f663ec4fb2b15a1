# SPDX-License-Identifier: Apache-2.0
"""Names and phrases in rows of tokens: finding those of a list, and finding phrases that come up by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

Payload = TypeVar("Payload")
Word = tuple[int, ...]  # the tokens of a word

# Of a corpus: rows that phrases are sought in, how often one has to come up, by how many times more often than its
# parts would by chance, and how many there are at most (Mikolov et al. 2013, arXiv 1310.4546, section 4).
SOUGHT_ROWS = 20_000
LEAST_COUNT = 10
LEAST_SCORE = 10.0
MOST_PHRASES = 2000


def words_of(ids: Sequence[int], word_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Where the words [start, stop) of a row stand; tokens with the word -1 are of none."""
    found = []
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or word_ids[place] != word_ids[start]:
            if word_ids[start] >= 0:
                found.append((start, place))
            start = place
    return found


def encoded_words(names: Sequence[str], tokenizer: Any) -> list[tuple[Word, ...]]:
    """The words of each name, as a fast tokenizer cuts them. Raises ValueError for a slow one."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} knows no words: take a fast tokenizer, or give the column 'unit_ids'"
        )
    if not names:
        return []
    encoded = tokenizer(list(names), add_special_tokens=False, return_attention_mask=False, verbose=False)
    rows = []
    for index, ids in enumerate(encoded["input_ids"]):
        words = [-1 if word is None else word for word in encoded.word_ids(index)]
        rows.append(tuple(tuple(ids[start:stop]) for start, stop in words_of(ids, words)))
    return rows


class NameTable(Generic[Payload]):
    """Names, each with what belongs to it, by the words that a tokenizer makes of them."""

    def __init__(self, names: Mapping[str, Payload], tokenizer: Any) -> None:
        self.by_first: dict[Word, list[tuple[tuple[Word, ...], Payload]]] = {}
        # Within a text a word may come with the space before it.
        for prefix in ("", " "):
            spelled = [prefix + name for name in names]
            for words, payload in zip(encoded_words(spelled, tokenizer), names.values(), strict=True):
                if words:
                    entries = self.by_first.setdefault(words[0], [])
                    if all(words != known for known, _ in entries):
                        entries.append((words, payload))
        for entries in self.by_first.values():
            entries.sort(key=lambda entry: -len(entry[0]))

    def find(self, ids: Sequence[int], words: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, Payload]]:
        """(first word, word behind the last one, what belongs to it) of every name in a row of `words_of`, from left
        to right, the longest first where several begin at a word."""
        spelled = [tuple(ids[start:stop]) for start, stop in words]
        place = 0
        while place < len(spelled):
            for name, payload in self.by_first.get(spelled[place], ()):
                end = place + len(name)
                # A token between words (a separator) ends what can be a name.
                joined = all(words[at][1] == words[at + 1][0] for at in range(place, min(end, len(words)) - 1))
                if joined and tuple(spelled[place:end]) == name:
                    yield place, end, payload
                    place = end
                    break
            else:
                place += 1


def read_lines(path: str, field: str) -> list[str]:
    """The lines of a file that are not empty. Raises ValueError where there is none."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{field}={path!r} cannot be read ({error.strerror}); give a text file") from error
    names = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not names:
        raise ValueError(f"{field}={path!r} has no name; write one on each line")
    return names


def row_columns(rows: Iterable[Mapping[str, Any]], most: int = SOUGHT_ROWS) -> Iterator[tuple[list[int], list[int]]]:
    """(input_ids, word_ids) of the first `most` rows, as lists."""
    for row in islice(rows, most):
        ids, words = row["input_ids"], row["word_ids"]
        yield (
            ids.tolist() if isinstance(ids, Tensor) else list(ids),
            words.tolist() if isinstance(words, Tensor) else list(words),
        )


def find_phrases(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[str]:
    """Phrases of two to four words that stand together in a corpus far more often than by chance, the commonest first.

    rows: with `input_ids` and `word_ids`. Words a, b are one phrase where (n_ab - d) N / (n_a n_b) exceeds a bound; a
    second pass joins phrases to longer ones (Mikolov et al. 2013, equation 6).
    """
    spelled: dict[Word, str | None] = {}

    def text(word: Word) -> str | None:
        if word not in spelled:
            plain = tokenizer.decode(list(word)).strip()
            spelled[word] = plain if plain.isalpha() else None
        return spelled[word]

    runs: list[list[str]] = []  # words that follow each other, without signs and separators between them
    for ids, word_ids in row_columns(rows):
        run: list[str] = []
        before = 0
        for start, stop in words_of(ids, word_ids):
            word = text(tuple(ids[start:stop]))
            if run and (word is None or start != before):
                runs.append(run)
                run = []
            if word is not None:
                run.append(word)
            before = stop
        if run:
            runs.append(run)
    found: Counter[str] = Counter()
    for _ in range(2):
        single = Counter(word for run in runs for word in run)
        pairs = Counter(pair for run in runs for pair in pairwise(run))
        total = sum(single.values())
        good = {
            (a, b): count
            for (a, b), count in pairs.items()
            if count >= LEAST_COUNT
            and a != b
            and (count - LEAST_COUNT / 2) * total > LEAST_SCORE * single[a] * single[b]
        }
        for (a, b), count in good.items():
            found[f"{a} {b}"] = count
        runs = [_joined(run, good) for run in runs]
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [phrase for phrase, _ in ranked[:MOST_PHRASES]]


def _joined(run: list[str], pairs: Mapping[tuple[str, str], int]) -> list[str]:
    out: list[str] = []
    place = 0
    while place < len(run):
        pair = (run[place], run[place + 1]) if place + 1 < len(run) else None
        joins = pair is not None and pair in pairs
        out.append(" ".join(pair) if joins and pair is not None else run[place])
        place += 2 if joins else 1
    return out
