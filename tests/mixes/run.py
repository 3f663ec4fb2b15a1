"""One mix of a long run, in a process of its own or not."""

from __future__ import annotations

import logging
import warnings

import torch
import transformers

from tests.mixes.check import check
from tests.mixes.draw import draw
from tests.mixes.shrink import shrink


def prepare() -> None:
    """One thread, and nothing said but the results."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def one(seed: int) -> tuple[int, str, str, str]:
    """The mix of this seed: its number, outcome, what was said, and for a third outcome a line that brings it
    again."""
    mix = draw(seed)
    outcome = check(mix)
    line = shrink(mix, outcome, check).line() if outcome.third else ""
    return seed, outcome.kind, outcome.detail, line
