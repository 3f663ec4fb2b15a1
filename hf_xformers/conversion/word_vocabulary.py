# SPDX-License-Identifier: Apache-2.0
"""The pickled word vocabulary of Transformer-XL's checkpoints as a tokenizer of today; no code in it is run."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

# The file that transformers 4 wrote, and that of its first releases, which torch wrote.
PICKLED, SAVED_BY_TORCH = "vocab.pkl", "vocab.bin"
_CONTAINERS = {
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("builtins", "__builtin__") for name in ("dict", "list", "set", "tuple")),
}


class _ContainersAlone(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CONTAINERS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def word_file(folder: Path) -> Path | None:
    """The vocabulary of a folder; None where there is none."""
    return next((folder / name for name in (PICKLED, SAVED_BY_TORCH) if (folder / name).is_file()), None)


def read_words(path: Path) -> dict[str, Any]:
    """The content of such a file, `sym2idx` among it.

    Raises:
        ValueError: it holds more than containers of words and numbers, is cut off, or lists no words.
    """
    import torch

    try:
        if path.name == SAVED_BY_TORCH:
            content = torch.load(path, weights_only=True)
        else:
            with path.open("rb") as file:
                content = _ContainersAlone(file).load()
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch continues with advice to run it all the same
        found = named[1] if named else " ".join(str(error).split())[:60]
        raise ValueError(
            f"{str(path)!r} is damaged or holds more than words and numbers ({found}), which is not read; put a"
            " tokenizer.json in its place, or remove it to convert the model without tokenizer."
        ) from None
    except Exception as error:  # a pickle may hold anything, and break anywhere
        raise ValueError(
            f"{str(path)!r} cannot be read ({type(error).__name__}); copy or download it again."
        ) from None
    ids = content.get("sym2idx") if isinstance(content, dict) else None
    numbers = list(ids.values()) if isinstance(ids, dict) and all(isinstance(word, str) for word in ids) else []
    if not numbers or any(type(number) is not int for number in numbers) or sorted(numbers) != [*range(len(numbers))]:
        raise ValueError(f"{str(path)!r} lists no words with ids from 0 on (`sym2idx`); copy or download it again.")
    return content


def word_tokenizer(path: Path) -> Any:
    """A tokenizer with the words of such a file. Words and punctuation marks are what stands between white space, as
    in the texts that these models were trained on; the Moses rules that prepared them are no part of it.

    Raises:
        ValueError: as [`read_words`], or no word stands for unknown ones.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    content = read_words(path)
    words = dict(content["sym2idx"])
    unknown = next((word for word in ("<unk>", "<UNK>") if word in words), None)
    if unknown is None:
        raise ValueError(f"{str(path)!r} has no word '<unk>' for unknown ones; copy or download it again.")
    made = Tokenizer(models.WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if content.get("lower_case"):
        made.normalizer = normalizers.Lowercase()
    special = {"eos_token": "<eos>"} if "<eos>" in words else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unknown, **special)
