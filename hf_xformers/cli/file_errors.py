# SPDX-License-Identifier: Apache-2.0
"""What the system says about files, disks, memory and packages, in a sentence: one place for all commands."""

from __future__ import annotations

import errno
import os
import re

from ..core.out_of_memory import is_out_of_memory
from ..metrics.scores import PACKAGES

_REMEDIES = {
    errno.ENOSPC: (
        "there is no space left on the disk; what was saved before is still there: free some space, or take another"
        " disk"
    ),
    errno.EDQUOT: (
        "your quota of the disk is used up; what was saved before is still there: free some space, or take another"
        " disk"
    ),
    errno.EFBIG: (
        "a file would be larger than the limit for files (`ulimit -f`, or the disk's own); raise it, or take another"
        " disk"
    ),
    errno.EROFS: "the disk can be read only; take a place on another one",
    errno.EACCES: "there is no permission; change the rights, or take another place",
    errno.EPERM: "the system does not permit it; change the rights, or take another place",
    errno.ENOTDIR: "a part of the path is a file where there should be a folder; give another path",
    errno.EEXIST: "it exists, and is a file where there should be a folder; give another path",
    errno.EISDIR: "it is a folder where there should be a file; give a file in it",
    errno.ENOENT: "there is no such file or folder; correct the path",
    errno.ENAMETOOLONG: "the name is too long; take a shorter one",
    errno.EMFILE: "too many files are open; raise the limit (`ulimit -n`)",
    errno.EIO: "the disk cannot be read or written; check it",
}


_OF_TRAIN = ("accelerate", "datasets", "evaluate", "peft", "psutil", *PACKAGES)  # what the extra has


def explain(error: BaseException) -> str | None:
    """What to tell somebody about a failure of files, disks and memory, or a missing package; None for other errors.

    Libraries written in Rust (safetensors, tokenizers) give the system's number in their text alone, and torch's
    writer of archives no reason at all.
    """
    if isinstance(error, ImportError):
        # transformers says itself that its Trainer lacks accelerate
        missing = error.name.partition(".")[0] if error.name else next((n for n in _OF_TRAIN if n in str(error)), "")
        if missing in _OF_TRAIN:
            return f"this command needs {missing}, which is not installed: pip install 'hf_xformers[train]'"
        return None
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename2 or error.filename
        return _sentence(error.errno, None if name is None else os.fsdecode(name))
    text = str(error)
    found = re.search(r"\(os error (\d+)\)", text)
    if found:
        return _sentence(int(found[1]), None)
    if isinstance(error, OSError):
        return text or type(error).__name__
    if type(error).__name__ == "SafetensorError":
        return f"a file of weights is no whole safetensors file ({text}); copy, download or save it again"
    if type(error).__name__ == "UnpicklingError":
        return (
            "a file of weights holds code or is damaged, and is not read; take the model as safetensors, or copy it"
            " again"
        )
    if isinstance(error, RuntimeError) and ("inline_container" in text or "PytorchStream" in text):
        return (
            "a file of torch's cannot be written or read to its end; what was saved before is still there: see that"
            " the disk has space and no limit for files (`ulimit -f`) is in the way"
        )
    if is_out_of_memory(error):
        asked = re.search(r"allocate (\d+) bytes", text) or re.search(r"allocate ([\d.]+ [KMGT]iB)", text)
        size = "" if asked is None else f" for {_bytes(asked[1])} more"
        return (
            f"there is not enough memory{size}; take smaller batches (--per_device_train_batch_size, --batch_size),"
            " shorter rows (--block_size, --max_length), a smaller model, or an attention whose memory grows less with"
            " the length"
        )
    return None


def _bytes(text: str) -> str:
    return f"{int(text) / 1e9:,.1f} GB" if text.isdigit() else text


def _sentence(number: int, name: str | None) -> str:
    reason = _REMEDIES.get(number, f"{os.strerror(number)}; correct the path, or take another place")
    return reason if name is None else f"{name!r}: {reason}"
