# SPDX-License-Identifier: Apache-2.0
"""The contract of heads."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ..core.components import Spec
from ..core.vocabulary_clusters import Cluster


class Logits(NamedTuple):
    """scale: what hidden states are multiplied by before the projection. cap: c, where logits x become c tanh(x / c).
    plain: they are last states, times the scale, times `decoder.weight`, and nothing more. projects: with the bias of
    `decoder` and the cap nothing more."""

    scale: float = 1.0
    cap: float | None = None
    plain: bool = False
    projects: bool = False


class HeadSpec(Spec):
    """Base of head specs.

    Attributes:
        normalizes: it has a norm, which is given no padding mask.
        leads_back: it goes from `hidden_size` to the width of the token table, where that is another.
        resizes: what it predicts can grow with the vocabulary.
        any_width: it reads last states of another width than `hidden_size`.
    """

    normalizes: ClassVar[bool] = False
    leads_back: ClassVar[bool] = False
    resizes: ClassVar[bool] = True
    any_width: ClassVar[bool] = False

    def clusters(self, config: Any) -> tuple[Cluster, ...] | None:
        """The clusters that the vocabulary is predicted in; None: it is predicted at once."""
        return None

    def tied(self, config: Any) -> dict[str, str]:
        """The head's tensors that are the embedding's unless the config unties them: name -> name there."""
        return {"decoder.weight": "tokens.weight"}

    def num_outputs(self, config: Any) -> int:
        """How many entries of the vocabulary can be predicted, from id 0 on: the last axis of the logits."""
        return config.vocab_size

    def logits(self, config: Any) -> Logits:
        """How they are made, for those who project the last states themselves."""
        return Logits()
