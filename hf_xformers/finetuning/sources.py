# SPDX-License-Identifier: Apache-2.0
"""Rows of a task from files or the Hub, as splits `train`, `validation`, `test` with the columns that the source
has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.delimited import reading_as, text_lines
from ..data.local_files import SPLIT_WORDS, files_under, find_files, format_of, listed
from ..data.parallel import parallel_lines
from ..data.saved import load_saved
from ..data.sources import hub_errors
from ..data.splitting import check_fraction, divide_rows, stable_fraction
from .origin import ORIGIN, columns_of, with_origins
from .tables import TABLE_SUFFIXES, read_table, squad_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from .options import TaskData

CONLL_SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
_SPLITS = ("train", "validation", "test")
Adjust = Callable[["Dataset", Path], "Dataset"]


def load_rows(
    source: TaskData,
    languages: tuple[str, str] | None = None,
    *,
    origins: bool = False,
    adjust: Adjust | None = None,
    texts: Sequence[str] = (),
) -> dict[str, Dataset]:
    """The splits of a source. Where none is for validation, `validation_fraction` of the training rows is held out: by
    a hash of a row's content, or of a question's context, so that equal rows are on one side and the order does not
    matter.

    origins: with the column `origin.ORIGIN`, the file and line of every row, for messages.
    adjust: what is done to the rows of each file, which it is given with the file's path.
    texts: columns of CSV and TSV files whose fields are texts even where all of them are numbers.

    CoNLL files give the columns `tokens` and `tags` (first and last of a line); parallel text, whose files end in
    `.<language>` (languages: from, to), gives a column per language. TSV fields stand as they are, without quotes.

    Raises:
        ValueError: nothing named, a missing, empty or unreadable file, a Hub dataset that does not exist or cannot be
            reached, parallel files of different lengths, or a split without rows.
    """
    check_fraction(source.validation_fraction)
    if not source.data:
        raise ValueError("no data is named; give files, a folder or a Hub dataset id with --data")
    with reading_as(source.encoding, texts):
        return _load_rows(source, languages, origins, adjust)


def _load_rows(
    source: TaskData, languages: tuple[str, str] | None, origins: bool, adjust: Adjust | None
) -> dict[str, Dataset]:
    splits = _load(source.data, source, languages, adjust=adjust)
    for split, names in (("validation", source.validation_data), ("test", source.test_data)):
        if names:
            parts = _load(names, source, languages, local=True, adjust=adjust)
            splits[split] = _joined(list(parts.values()))
    if "train" not in splits:
        raise ValueError(
            f"{listed(source.data)} has no split 'train' but {sorted(splits)}; name training rows in --data"
        )
    for split in _SPLITS:
        if split in splits and not len(splits[split]):
            raise ValueError(
                f"the {split} split of {listed(source.data)} has no rows; give a file that holds some, or leave it out"
            )
    splits = divided(splits, source)
    return splits if origins else {split: rows.select_columns(columns_of(rows)) for split, rows in splits.items()}


def divided(splits: Mapping[str, Dataset], source: TaskData, by: str | None = None) -> dict[str, Dataset]:
    """[`limited`] splits with some of the training rows held out, where none is for validation. by: a column whose
    equal values stay on one side."""
    found = dict(splits)
    if "validation" not in found and source.validation_fraction > 0:
        found["train"], found["validation"] = hold_out_rows(found["train"], source.validation_fraction, by)
    return limited(found, source)


def limited(splits: Mapping[str, Dataset], source: TaskData) -> dict[str, Dataset]:
    """The usual splits, of each the first rows, as many as are asked for."""
    limits = {"train": source.max_train_rows, "validation": source.max_eval_rows, "test": source.max_eval_rows}
    return {
        split: first_rows(splits[split], limits[split], f"--max_{'train' if split == 'train' else 'eval'}_rows")
        for split in _SPLITS
        if split in splits
    }


def _load(
    names: Sequence[str],
    source: TaskData,
    languages: tuple[str, str] | None,
    local: bool = False,
    adjust: Adjust | None = None,
) -> dict[str, Dataset]:
    saved = load_saved(names)
    if saved is not None:
        _no_config(source, names)
        return {split: _nested(as_stored(rows.with_format(None))) for split, rows in _usual_splits(saved).items()}
    suffixes = (*TABLE_SUFFIXES, *CONLL_SUFFIXES, *(f".{language}" for language in languages or ()))
    expanded = _expand(names, suffixes)
    blank = [
        name for name in expanded if Path(name).expanduser().is_file() and not Path(name).expanduser().stat().st_size
    ]
    if blank:
        raise ValueError(f"{blank[0]!r} is empty (0 bytes); give a file that holds rows, or leave it out")
    files = find_files(expanded)
    if files is None:
        if local:
            raise ValueError(f"there is no file {names[0]!r}; --validation_data and --test_data take files")
        return _from_hub(names[0], source.data_config)
    _no_config(source, names)
    return {split: _read(paths, source, languages, adjust) for split, paths in files.items()}


def _no_config(source: TaskData, names: Sequence[str]) -> None:
    if source.data_config is not None:
        raise ValueError(f"--data_config {source.data_config} is for Hub datasets; leave it out for {listed(names)}")


def _expand(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Folders as the files in them that a task can read; other names as they are."""
    expanded: list[str] = []
    for name in names:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            expanded.append(name)
            continue
        inside = files_under(folder, lambda file: file.suffix.lower() in suffixes)
        if not inside:
            raise ValueError(f"the folder {name!r} holds no file that ends in {', '.join(suffixes)}; name the files")
        expanded += map(str, inside)
    return expanded


def _read(
    paths: Sequence[Path], source: TaskData, languages: tuple[str, str] | None, adjust: Adjust | None = None
) -> Dataset:
    if languages is not None and all(path.suffix[1:] in languages for path in paths):
        return _parallel(paths, languages)
    parts = []
    for path in paths:
        if path.suffix.lower() in CONLL_SUFFIXES:
            found = _read_conll(path)
        else:
            found = as_stored(_read_table(path, source.column_names))
        parts.append(found if adjust is None else adjust(found, path))
    return _joined(parts)


def _joined(parts: Sequence[Dataset]) -> Dataset:
    from datasets import Value, concatenate_datasets

    filled = [part for part in parts if len(part)] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    first = columns_of(filled[0])
    for part in filled[1:]:
        if set(columns_of(part)) != set(first):
            raise ValueError(f"files of one split differ in their columns: {first} and {columns_of(part)}")
    if all(ORIGIN in part.column_names for part in filled):
        first = [*first, ORIGIN]
    chosen = [part.select_columns(first) for part in filled]
    for name in first:
        dtype = _common_dtype({getattr(part.features[name], "dtype", None) for part in chosen})
        if dtype is not None:
            chosen = [part.cast_column(name, Value(dtype)) for part in chosen]
    return concatenate_datasets(chosen)


def _common_dtype(dtypes: set[str | None]) -> str | None:
    """What a column is cast to whose types differ from file to file: decimals where some hold integers alone, text
    where some hold digits alone; None where the types are alike, or have nothing in common."""
    if dtypes == {"int64", "float64"}:
        return "float64"
    texts = len(dtypes) > 1 and dtypes <= {"int64", "string", "large_string"}
    return "large_string" if texts else None


def _read_table(path: Path, column_names: Sequence[str]) -> Dataset:
    if format_of(path) in (None, "text"):
        known = ", ".join((*TABLE_SUFFIXES, *CONLL_SUFFIXES))
        raise ValueError(
            f"{str(path)!r} is no table of rows: give a file that ends in {known}, or, of images and sounds, the"
            " folder that they are in"
        )
    return read_table(path, column_names)


def read_conll(path: Path) -> Iterator[dict[str, list[str]]]:
    """Sentences of a CoNLL file: a token per line, its tag last, separated by tabs or else by spaces; a blank line
    ends a sentence, and lines of `-DOCSTART-` are passed over.

    Raises ValueError for a line without a tag, with its number.
    """
    for _, tokens, tags in _sentences(path):
        yield {"tokens": tokens, "tags": tags}


def _read_conll(path: Path) -> Dataset:
    from datasets import Dataset

    found = list(_sentences(path))
    rows = Dataset.from_list([{"tokens": tokens, "tags": tags} for _, tokens, tags in found])
    return with_origins(rows, [f"{path.name!r}, line {line}" for line, _, _ in found])


def _sentences(path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """(line of the first token, tokens, tags) of every sentence."""
    tokens: list[str] = []
    tags: list[str] = []
    start = 0
    for number, line in enumerate([*text_lines(path), ""], start=1):
        if not line.strip():
            if tokens:
                yield start, tokens, tags
            tokens, tags = [], []
            continue
        fields = line.split("\t") if "\t" in line else line.split()
        if fields[0].startswith("-DOCSTART-"):
            continue
        if len(fields) < 2 or not fields[0].strip() or not fields[-1].strip():
            raise ValueError(
                f"line {number} of {str(path)!r} is {line!r}, without a tag; give a token and its tag per line"
            )
        start = start if tokens else number
        tokens.append(fields[0].strip())
        tags.append(fields[-1].strip())


def _parallel(paths: Sequence[Path], languages: tuple[str, str]) -> Dataset:
    """Lines of the files of two languages side by side."""
    from datasets import Dataset

    lines, places = parallel_lines(paths, languages)
    rows = Dataset.from_dict(dict(zip(languages, lines)))
    return with_origins(rows, [f"{name!r}, line {number}" for name, number in places])


def _from_hub(name: str, config_name: str | None) -> dict[str, Dataset]:
    import datasets

    with hub_errors(name, config_name):
        loaded = datasets.load_dataset(name, config_name)
    return {split: _nested(as_stored(rows)) for split, rows in _usual_splits(loaded).items()}


def as_stored(rows: Dataset, images: bool = False) -> Dataset:
    """The rows with columns of sound, and of images if they are asked for, as paths and bytes: what a decoder makes of
    these takes further packages, and has no content that could be compared."""
    import datasets

    kinds = (datasets.Audio, datasets.Image) if images else (datasets.Audio,)
    for name, feature in rows.features.items():
        if isinstance(feature, kinds):
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows


def _usual_splits(loaded: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The splits for training, validation and test, by the words in their names."""
    splits: dict[str, Dataset] = {}
    for split, rows in loaded.items():
        # validation_matched and its like: the first one validates
        word = next((SPLIT_WORDS[w] for w in re.split(r"[^a-z]+", split.lower()) if w in SPLIT_WORDS), None)
        if word is not None:
            splits.setdefault(word, rows)
    return splits or {"train": next(iter(loaded.values()))}


def _nested(rows: Dataset) -> Dataset:
    """Articles of paragraphs of questions as a row per question; other rows as they are."""
    names = rows.column_names
    if "paragraphs" in names:
        return squad_rows(list(rows), "paragraphs")
    articles = rows["data"][0] if "data" in names and len(rows) else None
    nested = isinstance(articles, list) and bool(articles) and "paragraphs" in articles[0]
    return squad_rows([article for part in rows["data"] for article in part], "data") if nested else rows


def hold_out_rows(rows: Dataset, fraction: float, by: str | None = None) -> tuple[Dataset, Dataset]:
    if len(rows) < 2:
        raise ValueError("a single training row cannot be divided; give more rows, or --validation_fraction 0")
    kept = as_stored(rows, images=True) if by is None else rows.select_columns([by])
    keys = [stable_fraction(_key(row)) for row in _plain(kept)]
    return divide_rows(rows, keys, fraction)


def _key(row: Mapping[str, Any]) -> str:
    """What decides on which side a row is: its content, and of a question its context, which others may be about
    too."""
    if "question" in row and isinstance(row.get("context"), str):
        return row["context"]
    content = {name: _content(value) for name, value in row.items() if name != ORIGIN}
    return json.dumps(content, sort_keys=True, default=str)


def _content(value: Any) -> Any:
    """A value, of a stored sound or image its bytes, whatever its file is called."""
    stored = isinstance(value, Mapping) and value.get("bytes") is not None
    return value["bytes"] if stored else value


def _plain(rows: Dataset) -> Iterator[Mapping[str, Any]]:
    for batch in rows.iter(1000):
        names = list(batch)
        yield from (dict(zip(names, values)) for values in zip(*batch.values()))


def first_rows(rows: Dataset, limit: int | None, option: str) -> Dataset:
    if limit is None:
        return rows
    if limit < 1:
        raise ValueError(f"{option} {limit} must be at least 1")
    return rows.select(range(min(limit, len(rows))))
