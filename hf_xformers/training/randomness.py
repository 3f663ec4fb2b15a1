"""Keeping the global random generators where they are."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


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
