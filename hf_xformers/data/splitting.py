# SPDX-License-Identifier: Apache-2.0
"""The one rule by which a document is held out for validation: a hash of its text or name, never its position.

A position-based rule gives other splits when a dataset is streamed, sharded over workers or reordered, and so lets
validation text leak into training; a hash does not, and it keeps equal texts on one side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

_FEW = 20  # rows whose figures say little


def stable_fraction(key: str, seed: int = 0) -> float:
    """A number in [0, 1) that depends on `key` and `seed` only: equal on every machine, Python version and process."""
    digest = hashlib.blake2b(
        key.encode("utf-8", errors="surrogatepass"), digest_size=8, key=str(seed).encode()
    ).digest()
    # 53 bits are what a float holds exactly; more could round up to 1.0.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def check_fraction(validation_fraction: float) -> None:
    """Raises ValueError unless 0 <= validation_fraction < 1."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction} is not in [0, 1); it is the share of the documents that is "
            "held out, for instance 0.05, or 0 for no validation split"
        )


def divide_rows(rows: Dataset, keys: Sequence[float], fraction: float) -> tuple[Dataset, Dataset]:
    """(train, validation) of rows with the [`stable_fraction`] of each, at least one on either side. A share that is
    tiny, or far from `fraction`, is said: many equal rows go to one side together."""
    lowest, highest = min(keys), max(keys)
    if lowest == highest:  # rows that are all alike
        held = [row == 0 for row in range(len(keys))]
    elif lowest >= fraction:  # a few rows: what a larger fraction would take first
        held = [key == lowest for key in keys]
    else:
        held = [key < min(fraction, highest) for key in keys]
    count, wanted = sum(held), fraction * len(held)
    if count < _FEW or not wanted / 2 <= count <= wanted * 2:
        from transformers.utils import logging  # slow to load, so not before it is needed

        logging.get_logger(__name__).warning(
            f"{count} of {len(held)} rows ({len(set(keys))} different ones, equal ones stay together) are held out for"
            f" validation, where {fraction:g} is {wanted:.0f}, and figures of few rows say little; give rows"
            " for validation, or another fraction"
        )
    return (
        rows.select([row for row, out in enumerate(held) if not out]),
        rows.select([row for row, out in enumerate(held) if out]),
    )
