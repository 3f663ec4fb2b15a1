# SPDX-License-Identifier: Apache-2.0
"""GGUF files, read through transformers: it gives their packed weights back in full precision."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import is_gguf_available, quantization_config

from .quiet import quiet

# Of the releases that would keep the blocks of the file.
_KEEPING = getattr(quantization_config, "GgufConfig", None)
_UNPACKED = {} if _KEEPING is None else {"quantization_config": _KEEPING(dequantize=True)}


def gguf_config(source: str | Path, gguf_file: str) -> PreTrainedConfig:
    """The config that a GGUF file of a folder or Hub id holds.

    Raises:
        ValueError: there is no such file, transformers cannot read it, or the package gguf is not installed.
    """
    return _read(AutoConfig, source, gguf_file)


@contextmanager
def unpacked(source: str | Path, gguf_file: str | None) -> Iterator[str | Path]:
    """`source` as it is; or, for a GGUF file in it, a folder of the block's own with model and tokenizer.

    Raises:
        ValueError: as [`gguf_config`].
    """
    if gguf_file is None:
        yield source
        return
    two_towers = gguf_config(source, gguf_file).is_encoder_decoder
    with tempfile.TemporaryDirectory() as place:
        with quiet(bars=True):
            auto = AutoModelForSeq2SeqLM if two_towers else AutoModelForCausalLM
            packed = _read(auto, source, gguf_file, **_UNPACKED)
            config = type(packed.config)(**{**packed.config.to_dict(), "quantization_config": None})
            del config.quantization_config
            given = {"config": config, "state_dict": packed.state_dict(), "dtype": packed.dtype}
            model = type(packed).from_pretrained(None, **given)  # what was read from GGUF does not save itself
        model.save_pretrained(place)
        del model, packed, given
        _read(AutoTokenizer, source, gguf_file).save_pretrained(place)
        yield Path(place)


def _read(auto: Any, source: str | Path, gguf_file: str, **options: Any) -> Any:
    name = os.path.expanduser(os.fspath(source))
    folder = Path(name)
    if not is_gguf_available():
        raise ValueError(f"`gguf_file` {gguf_file!r} is read by the package gguf, which is missing: pip install gguf.")
    if folder.is_dir() and not (folder / gguf_file).is_file():
        raise ValueError(f"There is no file {gguf_file!r} in {name!r}; correct `gguf_file`.")
    try:
        return auto.from_pretrained(name, gguf_file=gguf_file, trust_remote_code=False, **options)
    except Exception as error:  # of whichever part of transformers reads it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(":.")
        raise ValueError(f"transformers cannot read the GGUF file {gguf_file!r} of {name!r}: {reason}.") from error
