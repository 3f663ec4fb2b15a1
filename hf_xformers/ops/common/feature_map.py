# SPDX-License-Identifier: Apache-2.0
"""What a scan may ask of a feature map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# `pull(to_features, to_log)`: the gradients of a map's input and of its active parameters.
Pull = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]


class MapWithPullback(ABC):
    """A feature map that knows its own pullback, for scans that evaluate a map again in their backward pass."""

    @abstractmethod
    def __call__(self, x: Tensor, *params: Tensor) -> Any:
        """[..., d] -> features [..., F], or a pair of these and the logarithms of a factor [...]."""

    @abstractmethod
    def with_pullback(
        self, x: Tensor, params: tuple[Tensor, ...] = (), active: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None, Pull]:
        """Features, log factors or None, and what takes gradients of both to those of `x` and of the params whose
        index is in `active`."""
