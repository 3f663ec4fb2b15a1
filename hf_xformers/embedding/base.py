# SPDX-License-Identifier: Apache-2.0
"""The embedding contract."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..core.components import Spec
from ..core.vocabulary_clusters import Cluster


class InputPosition(Protocol):
    """What an embedding asks of the position component."""

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """hidden_states [B, T, D], positions [B or 1, T] -> [B, T, D] with what positions add; D as
        [`EmbeddingSpec.position_width`] says."""
        ...


class EmbeddingSpec(Spec):
    """Base of embedding specs."""

    def table_width(self, config: Any) -> int:
        """Columns of the token table, which the towers of an encoder-decoder share."""
        return config.hidden_size

    def position_width(self, config: Any) -> int:
        """Width of the states that positions are added to."""
        return config.hidden_size

    def clusters(self, config: Any) -> tuple[Cluster, ...] | None:
        """The clusters of a vocabulary whose words have vectors of several widths; None: there is one table."""
        return None

    def tables(self, config: Any) -> tuple[str, ...]:
        """Names of the tensors that make up the token table, which both towers of an encoder-decoder share."""
        return ("tokens.weight",)

    def normalizes(self) -> bool:
        """Whether a norm of `hidden_size` stands in it, which is given no padding mask."""
        return False
