# SPDX-License-Identifier: Apache-2.0
"""What a teacher writes for each row, kept line by line in a file, so that an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.saved_files import write_text
from .methods.sequence_level import SequenceLevel

FILE = "teacher_texts.jsonl"
_EVERY = 50  # batches between two lines about the progress


def written_rows(
    path: Path,
    method: SequenceLevel,
    teacher: Any,
    features: Any,
    tokenizer: Any,
    *,
    longest: int,
    batch_size: int,
    say: Callable[[str], None],
) -> Any:
    """`features` with the teacher's texts in place of their own: as `labels` of an encoder-decoder, as `input_ids` of
    a causal model, where the first tokens of a row are given and it is as long as before.

    longest: tokens that an encoder-decoder may write.
    """
    known = _read(path)
    count = len(features)
    with path.open("a", encoding="utf-8") as file:
        batches = range(len(known), count, batch_size)
        for number, first in enumerate(batches):
            rows = [features[row] for row in range(first, min(first + batch_size, count))]
            if teacher.config.is_encoder_decoder:
                texts = _outputs(method, teacher, rows, tokenizer, longest)
            else:
                texts = _continuations(method, teacher, rows, tokenizer)
            for ids in texts:
                file.write(json.dumps(ids) + "\n")
                known.append(ids)
            file.flush()
            if number % _EVERY == _EVERY - 1 or first + batch_size >= count:
                say(f"texts of the teacher: {len(known):,} of {count:,} rows")
    return _replaced(features, "labels" if teacher.config.is_encoder_decoder else "input_ids", known[:count])


def _read(path: Path) -> list[list[int]]:
    """The rows of a file, up to one that was cut off, which is taken out."""
    if not path.is_file():
        return []
    found: list[list[int]] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for line in lines:
        try:
            ids = json.loads(line)
        except ValueError:
            break
        if not line.endswith("\n") or not isinstance(ids, list):
            break
        found.append(ids)
    if len(found) < len(lines):
        write_text(path, "".join(lines[: len(found)]))
    return found


def _replaced(features: Any, column: str, values: list[list[int]]) -> Any:
    from datasets import Dataset

    kept = {name: list(features[name]) for name in features.column_names if name != column}
    return Dataset.from_dict({**kept, column: values})


@torch.no_grad()
def _outputs(method: SequenceLevel, teacher: Any, rows: list[Mapping[str, Any]], tokenizer: Any, longest: int) -> Any:
    batch = tokenizer.pad(
        [{name: row[name] for name in ("input_ids", "attention_mask") if name in row} for row in rows],
        return_tensors="pt",
    ).to(teacher.device)
    made = teacher.generate(
        **batch, num_beams=method.num_beams, max_new_tokens=longest, do_sample=False, pad_token_id=_pad(tokenizer)
    )
    return list(_ended(made[:, 1:], tokenizer))


@torch.no_grad()
def _continuations(method: SequenceLevel, teacher: Any, rows: list[Mapping[str, Any]], tokenizer: Any) -> Any:
    """Rows of one length go together: a prompt has no padding, and ends of text are no end of a row."""
    made: list[list[int]] = []
    for row in _by_length(rows):
        ids = torch.tensor([list(entry["input_ids"]) for entry in row], device=teacher.device)
        prompt = ids[:, : method.prompt_tokens]
        more = ids.shape[1] - prompt.shape[1]
        if more > 0:
            ids = teacher.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=method.num_beams,
                min_new_tokens=more,
                max_new_tokens=more,
                do_sample=False,
                pad_token_id=_pad(tokenizer),
            )
        made += ids.tolist()
    return made


def _by_length(rows: list[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Neighbors of one length, in their order."""
    group: list[Mapping[str, Any]] = []
    for row in rows:
        if group and len(row["input_ids"]) != len(group[0]["input_ids"]):
            yield group
            group = []
        group.append(row)
    yield group


def _ended(made: Tensor, tokenizer: Any) -> Iterator[list[int]]:
    """Each row up to its end, which stays, without padding."""
    for row in made.tolist():
        end = tokenizer.eos_token_id
        if end in row:
            row = row[: row.index(end) + 1]
        yield [token for token in row if token != tokenizer.pad_token_id or token == end]


def _pad(tokenizer: Any) -> Any:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
