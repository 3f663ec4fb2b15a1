# SPDX-License-Identifier: Apache-2.0
"""Parallel text: sentences in two languages that say the same, from two files, two columns, or made by rule."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .delimited import text_lines
from .local_files import files_under, format_of, listed, split_of
from .phrases import LANGUAGES, PHRASES_ID, phrase_pairs
from .saved import load_saved
from .sources import canonical_split, choose_train, hub_errors, no_config, read_files
from .splitting import check_fraction, divide_rows, stable_fraction
from .stdlib_corpus import STDLIB_CORPUS_ID

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

FIRST, SECOND = "text", "translation"  # columns of a pair


def load_parallel_dataset(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    languages: Sequence[str],
    *,
    split: str | None = None,
    config_name: str | None = None,
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> DatasetDict:
    """Loads parallel text as splits `train`, `validation` and any other it names, with columns `text` (the first
    language) and `translation` (the second).

    Args:
        source: `"phrases"`, English and German sentences made by rule; files that end in `.<language>` and have a line
            for each other's lines, a folder of them, or what their names begin with (`data/train` for `data/train.de`
            and `data/train.en`); `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`, folders of `save_to_disk`, or a Hub
            dataset, with a column for each language, or a column `translation` with both.
        languages: the two, as columns and files are named.
        split: use only this split, or slice of one, as the training text; validation text is then taken from it.
        config_name: configuration of a Hub dataset.
        validation_fraction, seed: as of `load_text_dataset`; the pairs that are held out follow from a hash of both
            texts.

    Pairs of which one side is blank are left out.

    Raises:
        ValueError: text without pairs, missing files or columns, files of different lengths, an unknown split.
    """
    from datasets import DatasetDict

    check_fraction(validation_fraction)
    if len(languages) != 2 or languages[0] == languages[1]:
        raise ValueError(f"languages={list(languages)} must be two that differ, such as ['en', 'de']")
    names = [os.fspath(name) for name in ([source] if isinstance(source, (str, os.PathLike)) else source)]
    if not names:
        raise ValueError(f"no parallel text is named; give files, a folder, a Hub dataset id, or {PHRASES_ID!r}")
    splits = {name: _filled(rows, names) for name, rows in _splits(names, tuple(languages), config_name).items()}
    splits = choose_train(splits, split, names)
    if validation_fraction > 0 and "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], validation_fraction, seed, names)
    order = {"train": 0, "validation": 1}
    return DatasetDict({name: splits[name] for name in sorted(splits, key=lambda name: (order.get(name, 2), name))})


def _splits(names: list[str], languages: tuple[str, ...], config_name: str | None) -> dict[str, Dataset]:
    from datasets import Dataset

    if names == [PHRASES_ID]:
        no_config(config_name, names)
        if set(languages) != set(LANGUAGES):
            raise ValueError(
                f"{PHRASES_ID!r} is in {' and '.join(LANGUAGES)}, not in {' and '.join(languages)}; name other data"
            )
        columns = dict(zip(LANGUAGES, map(list, zip(*phrase_pairs()))))
        return {"train": Dataset.from_dict({FIRST: columns[languages[0]], SECOND: columns[languages[1]]})}
    if STDLIB_CORPUS_ID in names:
        raise ValueError(
            f"{STDLIB_CORPUS_ID!r} has no pairs of translations; give parallel text, or {PHRASES_ID!r}, which is made"
            " by rule"
        )
    files = _language_files(names, languages)
    if files:
        no_config(config_name, names)
        sides = {split: parallel_lines(found, languages)[0] for split, found in files.items()}
        return {split: Dataset.from_dict(dict(zip((FIRST, SECOND), lines))) for split, lines in sides.items()}
    saved = load_saved(names)
    if saved is not None or Path(names[0]).expanduser().is_file():
        no_config(config_name, names)
    tables: Mapping[str, Any] = saved if saved is not None else _tables(names, languages, config_name)
    return {canonical_split(split, tables): _columns(rows, languages, names) for split, rows in tables.items()}


def _language_files(names: Sequence[str], languages: Sequence[str]) -> dict[str, list[Path]]:
    """Split -> files, of those that end in a language; empty where none does."""
    suffixes = [f".{language}" for language in languages]
    found: dict[Path, Path | None] = {}
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found.update(dict.fromkeys(files_under(path, lambda file: file.suffix in suffixes), path))
        elif path.suffix in suffixes and path.is_file():
            found[path] = None
        else:
            both = [path.with_name(path.name + suffix) for suffix in suffixes]
            found.update(dict.fromkeys((file for file in both if file.is_file()), None))
    files: dict[str, list[Path]] = {}
    for path, folder in sorted(found.items()):
        files.setdefault(split_of(path, folder) or "train", []).append(path)
    return files


def parallel_lines(paths: Sequence[Path], languages: Sequence[str]) -> tuple[list[list[str]], list[tuple[str, int]]]:
    """(the lines of each of two languages, the file and line of each pair). Files go together that are called the same
    but for the language they end in; a single file of each goes with the other one, whatever they are called.

    Raises:
        ValueError: a file without its other side, or a pair of files that differ in their number of lines.
    """
    sides = []
    for language in languages:
        files = [path for path in paths if path.suffix == f".{language}"]
        if not files:
            there = listed([str(path) for path in paths])
            raise ValueError(f"there is no file that ends in .{language} next to {there}; give both sides")
        sides.append(sorted(files, key=lambda path: (path.stem, path)))
    lines: list[list[str]] = [[], []]
    places: list[tuple[str, int]] = []
    for pair in zip_longest(*sides):
        names = [path.stem for path in pair if path is not None]
        if len(paths) > 2 and (len(names) < 2 or names[0] != names[1]):
            alone = next(path for path in pair if path is not None and path.stem == min(names))
            raise ValueError(
                f"{str(alone)!r} has no other side: with several files, the two of a pair must be called the same but"
                f" for .{languages[0]} and .{languages[1]}; rename it, or leave it out"
            )
        found = [text_lines(path) for path in pair]
        if len(found[0]) != len(found[1]):
            raise ValueError(
                f"parallel files must have a line for each other's lines, and {str(pair[0])!r} has {len(found[0])} and"
                f" {str(pair[1])!r} {len(found[1])}; give two files of the same sentences"
            )
        for side, part in zip(lines, found):
            side += part
        places += [(pair[1].name, number) for number in range(1, len(found[1]) + 1)]
    return lines, places


def _tables(names: list[str], languages: Sequence[str], config_name: str | None) -> Mapping[str, Dataset]:
    import datasets

    paths = [Path(name).expanduser() for name in names]
    if all(path.is_file() for path in paths):
        kinds = {format_of(path) for path in paths}
        if len(kinds) > 1 or kinds & {None, "text"}:
            raise ValueError(
                f"{listed(names)} has no pairs of translations; give files that end in the languages"
                " (.de, .en), or a table with a column for each"
            )
        (kind,) = kinds
        files: dict[str, list[str]] = {}
        for path in paths:
            files.setdefault(split_of(path, None) or "train", []).append(str(path))
        if "train" not in files:
            files = {"train": [str(path) for path in paths]}
        return {split: read_files(str(kind), found, texts=languages)[0] for split, found in files.items()}
    if len(names) > 1 or paths[0].exists() or names[0].startswith((".", "/", "~")):
        raise ValueError(
            f"{listed(names)} names no parallel text; give files that end in the languages, a folder of them, a"
            f" table, a Hub dataset id, or {PHRASES_ID!r}"
        )
    with hub_errors(names[0], config_name):
        return datasets.load_dataset(names[0], config_name)


def _columns(rows: Dataset, languages: Sequence[str], names: Sequence[str]) -> Dataset:
    from datasets import Features, Value

    flat = rows.flatten()
    for form in ("{}", "translation.{}"):
        wanted = [form.format(language) for language in languages]
        if all(name in flat.column_names for name in wanted):
            kept = flat.select_columns(wanted).rename_columns(dict(zip(wanted, (FIRST, SECOND))))
            return kept.cast(Features(dict.fromkeys((FIRST, SECOND), Value("string"))))  # a table may hold numbers
    raise ValueError(
        f"{listed(list(names))} has no pair of columns {languages[0]!r} and {languages[1]!r} (nor 'translation' with"
        f" both); its columns are {', '.join(map(repr, rows.column_names))}"
    )


def _filled(rows: Dataset, names: Sequence[str]) -> Dataset:
    kept = rows.filter(_both, input_columns=[FIRST, SECOND])
    if not len(kept):
        raise ValueError(f"{listed(list(names))} has no pair of translations with text on both sides; give some")
    return kept


def _both(first: str | None, second: str | None) -> bool:
    return bool(first and first.strip() and second and second.strip())


def _hold_out(rows: Dataset, fraction: float, seed: int, names: Sequence[str]) -> tuple[Dataset, Dataset]:
    if len(rows) < 2:
        raise ValueError(
            f"the single pair of {listed(list(names))} cannot be divided; give more, or validation_fraction=0"
        )
    keys = [stable_fraction(f"{row[FIRST]}\t{row[SECOND]}", seed) for row in rows]
    return divide_rows(rows, keys, fraction)
