# SPDX-License-Identifier: Apache-2.0
"""Which processes of a run read the same batch: those of a text that is divided, and those of a model that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor


@dataclass(frozen=True)
class Readers:
    """Batches that are read at once. `each` consecutive processes read the same one; `index`: that of this process, of
    `count`."""

    count: int
    index: int
    each: int


def gather_for_metrics(accelerator: Accelerator, data: Any, readers: Readers) -> Any:
    """Accelerate's function of this name, with every batch once: tensors [rows, ...] of all readers behind each other,
    without the rows that only fill up the last batch."""
    if readers.each == 1:
        return accelerator.gather_for_metrics(data)
    state = accelerator.gradient_state
    real = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def of_readers(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (readers.count, readers.each, -1))[:, 0].flatten(0, 1)[:real]

    return recursively_apply(of_readers, accelerator.gather(data))
