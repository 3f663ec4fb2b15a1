# SPDX-License-Identifier: Apache-2.0
"""Errors that are told in one sentence are not told by `datasets` before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_told_elsewhere() -> Iterator[None]:
    """Keeps `datasets` from logging what it also raises."""
    logger = logging.getLogger("datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
