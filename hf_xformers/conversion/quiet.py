# SPDX-License-Identifier: Apache-2.0
"""Loading without transformers' reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Loading without transformers' own remarks: what is new and what is tied stands in the report. bars: progress is
    shown, which takes a while from a disk and none from memory."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled() and not bars
    logging.set_verbosity_error()
    if bar:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
