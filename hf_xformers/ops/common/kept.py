# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made once and kept for later calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")


def kept(most: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Keeps what a function of hashable arguments has made for the last `most` of them; a device is to be one of these
    arguments, and a type where there is a choice.

    Made outside of inference mode, whose tensors no later call could train with. While a graph is recorded the
    function runs each time: tensors of a graph are none to keep.
    """

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        @functools.lru_cache(maxsize=most)
        def keep(*arguments: object) -> Made:
            with torch.inference_mode(False):
                return make(*arguments)

        @functools.wraps(make)
        def find(*arguments: object) -> Made:
            recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
            return (make if recorded else keep)(*arguments)

        return find

    return decorate
