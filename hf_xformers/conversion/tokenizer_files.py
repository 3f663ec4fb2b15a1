# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint, as far as it goes along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..core.saved_files import read_object
from .base import first_line
from .word_vocabulary import word_file, word_tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


def open_tokenizer(source: str | Path) -> Any | None:
    """The tokenizer of a folder or Hub id; None if it has none. No code of a repository is run.

    Raises:
        ValueError: a folder has one that cannot be read.
    """
    name = os.path.expanduser(os.fspath(source))
    local = Path(name)
    whole = any((local / file).is_file() for file in _TOKENIZER_FILES if file != "tokenizer_config.json")
    words = None if whole or not local.is_dir() else word_file(local)
    if words is not None:
        return word_tokenizer(words)
    if local.is_dir() and not any((local / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of any library that reads one of its files
        if not local.is_dir():
            return None
        if _own_tokenizer_code(local / "tokenizer_config.json"):  # there is one, and it would be lost
            raise ValueError(
                f"The tokenizer of {name!r} is code of its own (`auto_map`), which is never run; put a"
                " tokenizer.json in its place, or remove its files to convert the model without it."
            ) from error
        raise ValueError(
            f"The tokenizer of {name!r} cannot be read ({first_line(error).rstrip(':.')}); copy or"
            " download it again, or remove its files to convert the model without it."
        ) from error


def _own_tokenizer_code(settings: Path) -> bool:
    try:
        return bool(read_object(settings).get("auto_map"))
    except (OSError, ValueError):
        return False
