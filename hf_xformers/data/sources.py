# SPDX-License-Identifier: Apache-2.0
"""One door to text: the embedded corpus, local files or a Hub dataset, as train and validation splits of `text`."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .delimited import DAMAGED, check_fields, encoding, table_options
from .local_files import SPLIT_WORDS, find_files, format_of, listed
from .pieces import divide
from .quiet import errors_told_elsewhere
from .saved import load_saved
from .splitting import check_fraction, divide_rows, stable_fraction
from .stdlib_corpus import STDLIB_CORPUS_ID, stdlib_corpus

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict

_LARGEST_DOCUMENT = 2**30  # bytes; Arrow's texts end at two of these
_STRING_TYPES = ("string", "large_string")


def load_text_dataset(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    split: str | None = None,
    text_column: str | None = None,
    config_name: str | None = None,
    streaming: bool = False,
    validation_fraction: float = 0.05,
    seed: int = 0,
    sample_by: Literal["line", "paragraph", "document"] = "line",
    num_proc: int | None = None,
) -> DatasetDict | IterableDatasetDict:
    """Loads a text source as splits `train`, `validation` and any other it names, each with the one column `text`.

    Args:
        source: what to read, looked up in this order:
            `"stdlib"`, the corpus of `stdlib_corpus` (write `"./stdlib"` for a folder of that name);
            a local file, a folder (searched recursively), a glob pattern, or a list of these: text (`.txt`, `.text`,
            `.md`), `.jsonl`/`.json`, `.csv`/`.tsv` with a header line, `.parquet`, each also compressed (`.gz`,
            `.bz2`, `.xz`, `.zst`); files of other suffixes are read as text when named singly or matched by a pattern,
            and passed over in a folder, as are hidden files, README and LICENSE;
            folders that `save_to_disk` of `datasets` wrote, of one dataset or of several splits;
            a dataset id of the Hub, such as `"Salesforce/wikitext"`.
        split: use only this split of the source as the training text, for instance `"unsupervised"`; without
            `streaming` also a slice of one, `"train[:10%]"`. Validation text is then taken from it. Default: all.
        text_column: the column that holds the text. Default: `text`, or else the only column of strings.
        config_name: configuration of a Hub dataset, for instance `"wikitext-103-raw-v1"`.
        streaming: read lazily, as an `IterableDatasetDict`.
        validation_fraction: share of the documents of `train` that becomes `validation` where the source has no
            validation split of its own; 0 for none. A document is held out by a hash of its text and `seed`, so the
            division is the same with and without streaming, in any order, for any number of shards or workers. A
            single document is divided by position, its last part for validation, at the end of a paragraph, line or
            word; so is each of several whole files where they are too few for the share (fewer than its reciprocal).
        seed: varies which documents are held out (not for `"stdlib"`, whose division is fixed).
        sample_by: what one document of a plain text file is: a `line`, a `paragraph` (blank lines between), or the
            whole file (`document`) of at most 1 GiB, which keeps the line breaks of plays and code.
        num_proc: processes that prepare the data; default: none besides this one. Not used when streaming.

    Several files are divided by their names when one says `train`: of `train.txt` and `dev.txt` the second becomes
    `validation`. Documents of white space are left out.

    Raises:
        ValueError: a missing or empty file, no usable text column (the message lists the columns), a Hub dataset that
            does not exist or cannot be reached, an unknown split, or a source that is none of the forms above.
        TypeError: `source` is not a string, a path, or a sequence of these.
    """
    from datasets import DatasetDict, IterableDatasetDict

    check_fraction(validation_fraction)
    if sample_by not in ("line", "paragraph", "document"):
        raise ValueError(f"sample_by={sample_by!r} is unknown; take 'line', 'paragraph' or 'document'")
    names = _names(source)
    saved = None if names == [STDLIB_CORPUS_ID] else load_saved(names)
    files = None if names == [STDLIB_CORPUS_ID] or saved is not None else find_files(names)
    if names == [STDLIB_CORPUS_ID]:
        splits = _load_stdlib(validation_fraction, text_column, streaming)
    elif saved is not None:
        splits = _from_saved(saved, text_column, streaming, names, num_proc)
    elif files is not None:
        splits = _load_files(files, text_column, streaming, sample_by, num_proc)
    else:
        splits = _load_hub(names[0], config_name, split, text_column, streaming, num_proc)
        split = config_name = None  # the Hub was asked for that part alone
    no_config(config_name, names)

    splits = choose_train(splits, split, names)
    for name in {"train", "validation"} & set(splits):
        _refuse_empty(splits[name], name, names)
    if validation_fraction > 0 and "validation" not in splits:
        whole_files = files is not None and sample_by == "document"
        few = max(1, math.ceil(1 / validation_fraction) - 1) if whole_files else 1
        divide_all = _number_of(splits["train"], few + 1) <= few
        hold_out = _hold_out_ends if divide_all else partial(_hold_out, seed=seed)
        splits["train"], splits["validation"] = hold_out(splits["train"], fraction=validation_fraction)
    splits = {name: splits[name] for name in sorted(splits, key=_split_order)}
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def _names(source: Any) -> list[str]:
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    if not isinstance(source, Sequence) or not all(isinstance(item, (str, os.PathLike)) for item in source):
        raise TypeError(f"source must be a string, a path or a list of these, not {source!r}")
    if not source or not all(os.fspath(item) for item in source):
        raise ValueError(
            f"source={source!r} names nothing; give 'stdlib', a file, folder or glob, or a Hub dataset id"
        )
    return [os.fspath(item) for item in source]


# --- the embedded corpus -------------------------------------------------------------------------------------------


def _load_stdlib(validation_fraction: float, text_column: str | None, streaming: bool) -> dict[str, Any]:
    if text_column not in (None, "text"):
        raise ValueError(f"text_column={text_column!r}: the text of {STDLIB_CORPUS_ID!r} is in 'text'; leave it out")
    splits = {name: dataset.select_columns("text") for name, dataset in stdlib_corpus(validation_fraction).items()}
    return {name: d.to_iterable_dataset() for name, d in splits.items()} if streaming else splits


# --- local files ---------------------------------------------------------------------------------------------------


def _load_files(
    files: Mapping[str, list[Path]], text_column: str | None, streaming: bool, sample_by: str, num_proc: int | None
) -> dict[str, Any]:
    import datasets

    splits: dict[str, Any] = {}
    for split, paths in files.items():
        groups: dict[str, list[str]] = {}
        for path in paths:
            groups.setdefault(format_of(path) or "text", []).append(str(path))
        parts = [_load_format(kind, g, text_column, streaming, sample_by, num_proc) for kind, g in groups.items()]
        splits[split] = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    return splits


def _load_format(
    kind: str, files: list[str], text_column: str | None, streaming: bool, sample_by: str, num_proc: int | None
) -> Any:
    """The texts of files of one format, in the order of the files."""
    for file in files:
        if kind == "text" and sample_by == "document" and os.path.getsize(file) > _LARGEST_DOCUMENT:
            raise ValueError(
                f"{file!r} of {os.path.getsize(file) / 2**30:.1f} GiB is too long for one document; take "
                "sample_by='paragraph' or 'line', or divide the file"
            )
    options = {"sample_by": sample_by} if kind == "text" else {}
    texts = [text_column or "text"]
    loaded, features = read_files(kind, files, texts=texts, streaming=streaming, num_proc=num_proc, **options)
    return _text_only(loaded, features, text_column, files, num_proc)


def read_files(
    kind: str,
    files: Sequence[str],
    *,
    texts: Sequence[str] = (),
    streaming: bool = False,
    num_proc: int | None = None,
    **options: Any,
) -> tuple[Dataset | IterableDataset, Features | None]:
    """The rows of files of one format, in the order of the files, and their columns (None: a stream without rows).
    texts: columns of tables whose fields are texts, also where all are numbers.

    Raises ValueError for files that cannot be read as that.
    """
    import datasets

    options |= {} if kind == "parquet" else {"encoding": encoding()}
    if kind in ("csv", "tsv"):
        for file in files:
            check_fields(Path(file), kind)
        options |= {**table_options(texts), "sep": "\t" if kind == "tsv" else ","}
    try:
        with errors_told_elsewhere():
            loaded = datasets.load_dataset(
                "csv" if kind == "tsv" else kind,
                data_files={"train": [glob.escape(file) for file in files]},
                split="train",
                streaming=streaming,
                num_proc=None if streaming else num_proc,
                **options,
            )
            return loaded, loaded.features or _first_features(loaded)
    except (datasets.exceptions.DatasetGenerationError, ValueError, *DAMAGED) as error:  # decoding and parsing, too
        form = kind if kind == "parquet" else f"{encoding().upper()} {kind}"
        raise ValueError(
            f"{listed(files)} could not be read as {form} ({_first_line(error.__cause__ or error)}); "
            "name its --encoding, or give it the suffix of its format"
        ) from error


def _from_saved(
    saved: Mapping[str, Dataset], text_column: str | None, streaming: bool, names: Sequence[str], num_proc: int | None
) -> dict[str, Any]:
    parts = {
        split: rows.to_iterable_dataset() if streaming else rows.with_format(None) for split, rows in saved.items()
    }
    return {
        split: _text_only(part, saved[split].features, text_column, names, num_proc) for split, part in parts.items()
    }


# --- the Hub -------------------------------------------------------------------------------------------------------


def _load_hub(
    name: str,
    config_name: str | None,
    split: str | None,
    text_column: str | None,
    streaming: bool,
    num_proc: int | None,
) -> dict[str, Any]:
    import datasets

    with hub_errors(name, config_name, split):
        loaded = datasets.load_dataset(
            name, config_name, split=split, streaming=streaming, num_proc=None if streaming else num_proc
        )
        if not isinstance(loaded, dict):
            loaded = {"train": loaded}
        features = {key: part.features or _first_features(part) for key, part in loaded.items()}
    return {
        canonical_split(key, loaded): _text_only(part, features[key], text_column, [name], num_proc)
        for key, part in loaded.items()
    }


def no_config(config_name: str | None, names: Sequence[str]) -> None:
    """Raises ValueError for a configuration of what is no Hub dataset."""
    if config_name is not None:
        raise ValueError(f"config_name={config_name!r} is for Hub datasets; leave it out for {listed(names)}")


@contextmanager
def hub_errors(name: str, config_name: str | None, split: str | None = None) -> Iterator[None]:
    """Raises ValueError with the remedy for what goes wrong in the block, which loads a dataset of the Hub."""
    import datasets

    # HTTPError is whatever the installed huggingface_hub's HTTP client raises; it is not always an OSError.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"the Hub has no dataset {name!r} that you may read, and there is no such local file or folder; check the "
            "id, log in with `hf auth login` if it is private or gated, or give a local path"
        ) from error
    except (ConnectionError, TimeoutError, HTTPError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"the Hub dataset {name!r} could not be reached ({_first_line(error)}) and is not in the local cache; "
            "give a local file or folder, or enable the network (unset HF_HUB_OFFLINE)"
        ) from error
    # An unknown configuration or split, of which `datasets` lists the valid ones; a script; no files, or damaged ones.
    except (ValueError, RuntimeError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"the Hub dataset {name!r} could not be loaded with config_name={config_name!r}, split={split!r}: "
            f"{error.__cause__ or error}"
        ) from error


def canonical_split(split: str, siblings: Iterable[str]) -> str:
    """`valid`, `dev`, ... -> `validation` and so on, unless the dataset has a split of that very name besides it."""
    name = SPLIT_WORDS.get(split.lower(), split)
    return split if name in siblings else name


# --- common steps --------------------------------------------------------------------------------------------------


def _split_order(split: str) -> tuple[int, str]:
    return ({"train": 0, "validation": 1}.get(split, 2), split)


def choose_train(splits: dict[str, Any], split: str | None, names: Sequence[str]) -> dict[str, Any]:
    """The splits with the one to train on as `train`: all of them, or `split`, a name or a slice, alone.

    Raises ValueError where there is no such split, or none to train on.
    """
    if split is not None:
        base, bracket, bounds = split.partition("[")
        name = canonical_split(base, splits)
        if name not in splits:
            raise ValueError(f"{listed(names)} has no split {base!r}; choose one of {sorted(splits)}")
        return {"train": _slice(splits[name], split, bracket + bounds) if bracket else splits[name]}
    if "train" in splits:
        return splits
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    raise ValueError(f"{listed(names)} has no split 'train'; choose one of {sorted(splits)} with split=...")


def _slice(dataset: Dataset | IterableDataset, split: str, bounds: str) -> Dataset:
    """Rows of `dataset` for the bounds of a split such as `[:10%]`, with the meaning they have in `datasets`."""
    from datasets import Dataset, ReadInstruction

    if not isinstance(dataset, Dataset):
        raise ValueError(f"split={split!r} cuts rows, which needs their number; load without streaming to use a slice")
    try:
        part = ReadInstruction.from_spec(f"train{bounds}").to_absolute({"train": len(dataset)})[0]
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"split={split!r} is no slice; write for instance 'train[:10%]' or 'train[100:200]'"
        ) from error
    return dataset.select(range(part.from_ or 0, len(dataset) if part.to is None else part.to))


def _text_only(
    dataset: Dataset | IterableDataset,
    features: Features | None,
    text_column: str | None,
    names: Sequence[str],
    num_proc: int | None,
) -> Any:
    """The dataset with its text column alone, named `text`, without documents of white space."""
    from datasets import Dataset, Features, Value

    if features is None:  # a stream without a single example; the caller reports it
        return dataset
    column = _text_column(features, text_column, names)
    result = Features({"text": Value("string")})
    if isinstance(dataset, Dataset) and len(dataset) == 0:  # `map` would return it without columns
        return Dataset.from_dict({"text": []}, features=result)
    options: dict[str, Any] = {"num_proc": num_proc} if isinstance(dataset, Dataset) else {}
    return dataset.select_columns([column]).map(
        _keep_text,
        batched=True,
        fn_kwargs={"column": column},
        remove_columns=[column],
        features=result,
        **options,
    )


def _keep_text(batch: Mapping[str, list[Any]], column: str) -> dict[str, list[str]]:
    """The texts but blank ones, without the mark that some editors begin a file with."""
    texts = [text.removeprefix("\ufeff") for text in batch[column] if text]
    return {"text": [text for text in texts if text and not text.isspace()]}


def _first_features(dataset: IterableDataset) -> Features | None:
    from datasets import Dataset

    rows = list(dataset.take(1))
    return Dataset.from_list(rows).features if rows else None


def _text_column(features: Mapping[str, Any], wanted: str | None, names: Sequence[str]) -> str:
    kinds = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in features.items()}
    columns = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
    strings = [name for name, kind in kinds.items() if kind in _STRING_TYPES]
    if wanted is not None:
        if wanted not in strings:
            raise ValueError(f"{listed(names)} has no column of strings {wanted!r}; its columns are {columns}")
        return wanted
    if "text" in strings:
        return "text"
    if len(strings) == 1:
        return strings[0]
    raise ValueError(f"{listed(names)} has no column 'text'; choose one with text_column=... among {columns}")


def _refuse_empty(dataset: Any, split: str, names: Sequence[str]) -> None:
    from datasets import Dataset

    empty = len(dataset) == 0 if isinstance(dataset, Dataset) else not list(dataset.take(1))
    if empty:
        raise ValueError(f"the split {split!r} of {listed(names)} holds no text; give a source with non-blank text")


def _hold_out(dataset: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """(train, validation) of one dataset with the column `text`, by the hash rule of `splitting`."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        sides = [
            dataset.filter(
                _on_side, input_columns="text", fn_kwargs={"fraction": fraction, "seed": seed, "held_out": held_out}
            )
            for held_out in (False, True)
        ]
        if not all(_number_of(side, 1) for side in sides):
            raise ValueError(
                f"validation_fraction={fraction} leaves no document on one side of so short a stream; give rows for"
                " validation, another fraction, or 0, or read the source without streaming"
            )
        return sides[0], sides[1]
    keys = [stable_fraction(text, seed) for batch in dataset.iter(1000) for text in batch["text"]]
    return divide_rows(dataset, keys, fraction)


def _number_of(dataset: Any, limit: int) -> int:
    """How many documents there are, counted up to `limit`."""
    from datasets import Dataset

    return len(dataset) if isinstance(dataset, Dataset) else sum(1 for _ in dataset.take(limit))


def _hold_out_ends(dataset: Any, fraction: float) -> tuple[Any, Any]:
    """(train, validation): the beginnings and the ends of every document."""
    train, validation = (
        dataset.map(_part, batched=True, batch_size=1, fn_kwargs={"fraction": fraction, "end": end})
        for end in (False, True)
    )
    if not _number_of(validation, 1):
        raise ValueError(
            "the source holds a single document of one word, which cannot be divided into training and validation"
            " text; set validation_fraction=0, or cut a text file finer with sample_by='paragraph' or 'line'"
        )
    return train, validation


def _part(batch: Mapping[str, list[str]], fraction: float, end: bool) -> dict[str, list[str]]:
    return {"text": [part for text in batch["text"] if (part := divide(text, fraction)[end])]}


def _on_side(text: str, fraction: float, seed: int, held_out: bool) -> bool:
    return (stable_fraction(text, seed) < fraction) == held_out


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
