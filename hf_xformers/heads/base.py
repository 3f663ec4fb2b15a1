"""The contract of heads."""

from __future__ import annotations

from typing import ClassVar

from ..core.components import Spec


class HeadSpec(Spec):
    """Base of head specs.

    normalizes: it has a norm, which is given no padding mask. leads_back: it goes from `hidden_size` to the width of
    the token table, where that is another.
    """

    normalizes: ClassVar[bool] = False
    leads_back: ClassVar[bool] = False

    def num_outputs(self, config) -> int:
        """How many entries of the vocabulary can be predicted, from id 0 on: the last axis of the logits."""
        return config.vocab_size


__all__ = ["HeadSpec"]
