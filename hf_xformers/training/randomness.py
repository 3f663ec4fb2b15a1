# SPDX-License-Identifier: Apache-2.0
"""Keeping the global random generators where they are."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def data_seed(args: Any) -> int:
    """What the order of rows is drawn by: `data_seed`, which may be 0, of Trainer's options, else their `seed`."""
    return args.seed if args.data_seed is None else args.data_seed


@contextlib.contextmanager
def preserved_randomness() -> Iterator[None]:
    """Whatever draws from the generators of Python, numpy or torch inside leaves no trace outside.

    A data loader draws a number each time it is iterated. Without this, training would depend on how often it was
    interrupted by an evaluation.
    """
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():  # the CPU's and every CUDA device's
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
