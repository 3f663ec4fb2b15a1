# SPDX-License-Identifier: Apache-2.0
"""Features of texts, or of images, from a model that stays as it is (Peters et al. 2019, arXiv 1903.05987): hidden
states of chosen layers, mixed, pooled or by token, in files that a stopped run continues with."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.given_options import refuse_alone
from ..core.pooling import pool
from ..core.saved_files import read_object, write_json
from . import loading
from .feature_reading import FeatureOptions, LayerChoice, Reader, ScalarMix
from .image_features import read_images, reads_images
from .options import TaskData, TaskOptions
from .tasks.classification import TextClassification

if TYPE_CHECKING:
    from datasets import Dataset

ABOUT_FILE = "features.json"
_SUFFIX = {"parquet": ".parquet", "safetensors": ".safetensors"}
_FILE = re.compile(r"features-\d+\.(parquet|safetensors)")


@dataclass
class Extraction:
    """splits: by name the rows, their texts, and the files of their features. resumed: files that were there."""

    options: FeatureOptions
    reader: Reader
    splits: dict[str, Dataset]
    texts: dict[str, list[list[str]]]
    files: dict[str, list[Path]]
    about: dict[str, Any]

    @property
    def missing(self) -> list[tuple[str, int]]:
        return [
            (split, index)
            for split, files in self.files.items()
            for index, file in enumerate(files)
            if not file.is_file()
        ]


def prepare(options: FeatureOptions, source: TaskData) -> Extraction:
    """Reads data and model, and checks that the folder holds nothing else.

    Raises ValueError that names the value and the remedy.
    """
    options.check()
    if not source.data:
        raise ValueError("there are no texts or images to read; give them with --data")
    if options.probe is None:  # nothing is held out
        if source.validation_fraction:
            refuse_alone(source, ("validation_fraction",), "--probe")
        source.validation_fraction = 0.0
    config = loading.open_config(options.model)
    reader: Reader | None = None
    if reads_images(config):
        reader, splits, texts = read_images(options, source, config)
    elif options.image_column is not None:
        raise ValueError(f"--image_column is about images, and {options.model!r} reads text; leave it out")
    else:
        splits, texts = _read_texts(options, source)
    folder = Path(options.output).expanduser()
    reader = Reader(options) if reader is None else reader
    about = _request(options, texts, reader)
    if not options.overwrite and _differs(folder, about["request"]):
        raise ValueError(
            f"--output {str(folder)!r} holds features of another request (other data, model, layers or sizes); take"
            " --overwrite to replace them, or another folder"
        )
    about |= {"states": reader.count, "width": int(reader.model.config.hidden_size), "max_length": reader.max_length}
    suffix = _SUFFIX[options.format]
    files = {
        name: [
            folder / name / f"features-{index:05d}{suffix}" for index in range(-(-len(rows) // options.rows_per_file))
        ]
        for name, rows in texts.items()
    }
    return Extraction(options, reader, splits, texts, files, about)


def _read_texts(options: FeatureOptions, source: TaskData) -> tuple[dict[str, Dataset], dict[str, list[list[str]]]]:
    """(splits, the texts of their rows)."""
    from .sources import load_rows

    task = TextClassification(
        TaskOptions(
            task="text-classification",
            text_column=options.text_column,
            text_pair_column=options.text_pair_column,
            label_column=options.probe,
        )
    )
    splits, texts = load_rows(source, texts=task.columns_of_text()), {}
    for name, rows in splits.items():
        task.find_columns(rows, answers=options.probe is not None)
        columns = [[("" if text is None else str(text)) for text in rows[column]] for column in task.text_columns]
        texts[name] = [list(row) for row in zip(*columns)]
    return splits, texts


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("features-*") if _FILE.fullmatch(path.name))


def _differs(folder: Path, request: Mapping[str, Any]) -> bool:
    """Whether the files in a folder are of another request. Early ones do not say of which weights they are."""
    there = folder / ABOUT_FILE
    before = read_object(there).get("request") if there.is_file() else request
    return before != request and before != {name: value for name, value in request.items() if name != "weights"}


def remove_earlier(made: Extraction) -> None:
    """Removes the files of an earlier extraction where they are to be replaced, and no other ones."""
    if not made.options.overwrite:
        return
    about = Path(made.options.output).expanduser() / ABOUT_FILE
    splits = {*made.files, *(read_object(about).get("rows", ()) if about.is_file() else ())}
    for path in (path for split in splits for path in _files(about.parent / split)):
        path.unlink()
    about.unlink(missing_ok=True)


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _request(options: FeatureOptions, texts: Mapping[str, list[list[str]]], reader: Reader) -> dict[str, Any]:
    ignored = ("output", "batch_size", "probe", "probe_l2", "overwrite", "use_cpu", "progress")
    request = {name: value for name, value in asdict(options).items() if name not in ignored}
    if options.learn_mix:
        del request["mix_scores"]  # where learning begins, and nothing of the files
    else:
        del request["learn_mix"]  # as files were written before there was this
    if options.image_column is None:
        del request["image_column"]  # for the same reason
    digest = hashlib.sha256()
    for name, rows in texts.items():
        digest.update(f"{name} {len(rows)}\n".encode())
        for row in rows:
            digest.update("\0".join(row).encode("utf-8", "replace") + b"\n")
    request |= {"texts": digest.hexdigest(), "weights": _digest(reader.model)}
    return {"request": request, "rows": {name: len(rows) for name, rows in texts.items()}}


def extract(made: Extraction, advance: Callable[[int], None] = lambda rows: None) -> None:
    """Writes the files that are missing, each whole or not at all. advance: called with numbers of rows done."""
    folder = Path(made.options.output).expanduser()
    write_json(folder / ABOUT_FILE, made.about)
    size = made.options.rows_per_file
    for split, index in made.missing:
        rows = made.texts[split][index * size : (index + 1) * size]
        columns = read_rows(made.reader, rows, made.options, advance)
        write_file(made.files[split][index], columns, first=index * size)


def read_rows(
    reader: Reader, rows: Sequence[list[str]], options: FeatureOptions, advance: Callable[[int], None]
) -> dict[str, list[Tensor]]:
    """By column the features of every row, in order: [D], or [tokens, D] without pooling."""
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in reader.choice.columns}
    for chosen in _batches(rows, options):
        states, mask = reader.states(reader.batch([rows[index] for index in chosen]))
        with torch.no_grad():
            columns = reader.choice.read([state.cpu() for state in states])
        mask = mask.cpu()
        for name, values in columns.items():
            pooled = values if options.pool == "none" else pool(values, mask, options.pool)
            for place, index in enumerate(chosen):
                found[name][index] = pooled[place][mask[place]] if options.pool == "none" else pooled[place]
        advance(len(chosen))
    return found


def _batches(rows: Sequence[list[str]], options: FeatureOptions) -> list[list[int]]:
    """Which rows are read together: those of like lengths; longest first, so that what does not fit into memory fails
    at once."""
    order = sorted(range(len(rows)), key=lambda index: -sum(map(len, rows[index])))
    return [order[start : start + options.batch_size] for start in range(0, len(order), options.batch_size)]


# ------------------------------------------------------------------------------------------------ files


def write_file(path: Path, columns: Mapping[str, Sequence[Tensor]], first: int) -> None:
    """`row` (its number in the split) and a column for each layer. In safetensors features by token stand after each
    other, and `tokens` says how many each row has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    count = len(next(iter(columns.values())))
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays = {"row": pa.array(range(first, first + count), pa.int64())}
        for name, values in columns.items():
            kind = pa.list_(pa.float32()) if values[0].ndim == 1 else pa.list_(pa.list_(pa.float32()))
            arrays[name] = pa.array([value.tolist() for value in values], kind)
        pq.write_table(pa.table(arrays), beside)
    else:
        from safetensors.torch import save_file

        tensors = {"row": torch.arange(first, first + count)}
        for name, values in columns.items():
            by_token = values[0].ndim == 2
            tensors[name] = torch.cat(list(values)) if by_token else torch.stack(list(values))
            if by_token:
                tensors["tokens"] = torch.tensor([len(value) for value in values])
        save_file({name: value.contiguous() for name, value in tensors.items()}, beside, metadata={"format": "pt"})
    os.replace(beside, path)


def read_features(folder: str | Path, split: str = "train") -> Iterator[dict[str, Any]]:
    """The rows of a split: `row`, and by column a tensor, [D] or [tokens, D]."""
    for path in _files(Path(folder) / split):
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path).to_pylist()
            for entry in table:
                yield {name: value if name == "row" else torch.tensor(value) for name, value in entry.items()}
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
            rows, counts = tensors.pop("row").tolist(), tensors.pop("tokens", None)
            parts = {
                name: list(value if counts is None else value.split(counts.tolist()))
                for name, value in tensors.items()
            }
            for place, row in enumerate(rows):
                yield {"row": row, **{name: values[place] for name, values in parts.items()}}


__all__ = [
    "Extraction",
    "FeatureOptions",
    "LayerChoice",
    "Reader",
    "ScalarMix",
    "extract",
    "prepare",
    "read_features",
    "read_rows",
    "remove_earlier",
]
