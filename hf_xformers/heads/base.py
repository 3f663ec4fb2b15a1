# SPDX-License-Identifier: Apache-2.0
"""The contract of heads."""

from __future__ import annotations

from typing import Any, ClassVar

from ..core.components import Spec
from ..core.vocabulary_clusters import Cluster


class HeadSpec(Spec):
    """Base of head specs.

    normalizes: it has a norm, which is given no padding mask. leads_back: it goes from `hidden_size` to the width of
    the token table, where that is another. resizes: what it predicts can grow with the vocabulary. any_width: it
    reads last states of another width than `hidden_size`. forecasts: it predicts numbers of a time series, no tokens.
    splits_vocabulary: whether tensor parallelism may give each process some of the rows of its projection, `decoder`,
    which is read by calling it alone.
    """

    normalizes: ClassVar[bool] = False
    leads_back: ClassVar[bool] = False
    resizes: ClassVar[bool] = True
    any_width: ClassVar[bool] = False
    forecasts: ClassVar[bool] = False
    splits_vocabulary: ClassVar[bool] = False

    def clusters(self, config: Any) -> tuple[Cluster, ...] | None:
        """The clusters that the vocabulary is predicted in; None: it is predicted at once."""
        return None

    def tied(self, config: Any) -> dict[str, str]:
        """The head's tensors that are the embedding's unless the config unties them: name -> name there."""
        return {"decoder.weight": "tokens.weight"}

    def num_outputs(self, config: Any) -> int:
        """How many entries of the vocabulary can be predicted, from id 0 on: the last axis of the logits."""
        return config.vocab_size

    def logit_scale(self, config: Any) -> float:
        """What hidden states are multiplied by before the projection."""
        return 1.0

    def is_projection(self) -> bool:
        """Whether logits are last states, times the scale, times `decoder.weight`, and nothing more."""
        return False

    def logit_cap(self) -> float | None:
        """c, where logits x become c tanh(x / c)."""
        return None


__all__ = ["HeadSpec"]
