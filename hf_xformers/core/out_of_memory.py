# SPDX-License-Identifier: Apache-2.0
"""Whether an error says that memory ran out: torch has a class for it on accelerators alone."""

from __future__ import annotations

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _WORDS)
