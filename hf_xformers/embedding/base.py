"""The embedding contract."""

from __future__ import annotations

from ..core.components import Spec


class EmbeddingSpec(Spec):
    """Base of embedding specs."""

    def table_width(self, config) -> int:
        """Columns of the token table, which the towers of an encoder-decoder share."""
        return config.hidden_size

    def normalizes(self) -> bool:
        """Whether a norm of `hidden_size` stands in it, which is given no padding mask."""
        return False
