# SPDX-License-Identifier: Apache-2.0
"""A vocabulary in clusters, from frequent words to rare ones, each with vectors of its own width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cluster(NamedTuple):
    """The ids from `start` up to `stop`, with vectors of `width`."""

    start: int
    stop: int
    width: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(kw_only=True)
class ClusterFields:
    """The fields that an adaptive embedding and an adaptive head share, and what follows from them."""

    cutoffs: tuple[int, ...] = (20000, 60000)
    factor: int = 4
    width: int | None = None

    def check_clusters(self) -> None:
        """Refuses cutoffs that do not rise, and a factor or width below 1."""
        if any(low >= high for low, high in zip((0, *self.cutoffs), self.cutoffs, strict=False)):
            raise ValueError(f"An adaptive vocabulary needs `cutoffs` that rise from 1 on, got {list(self.cutoffs)}.")
        if self.factor < 1:
            raise ValueError(
                f"An adaptive vocabulary needs `factor` >= 1, by which clusters get narrower, got {self.factor}."
            )
        if self.width is not None and self.width < 1:
            raise ValueError(
                f"An adaptive vocabulary needs `width` >= 1, or None for `hidden_size`, got {self.width}."
            )

    def projects(self, config) -> bool:
        """Whether vectors are projected: not where all of them have the model's width."""
        return self.factor > 1 or self.width not in (None, config.hidden_size)

    def clusters(self, config) -> tuple[Cluster, ...]:
        """The clusters of the config's vocabulary: the cluster c has the width `width / factor^c`.

        Raises:
            ValueError: a cluster has no width left.
        """
        width = config.hidden_size if self.width is None else self.width
        ends = [*(cutoff for cutoff in self.cutoffs if cutoff < config.vocab_size), config.vocab_size]
        if width // self.factor ** (len(ends) - 1) < 1:
            raise ValueError(
                f"An adaptive vocabulary of {len(ends)} clusters has a last one of width {width} /"
                f" {self.factor}^{len(ends) - 1} < 1; take fewer `cutoffs` or a smaller `factor`."
            )
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        return tuple(Cluster(start, stop, width // self.factor**index) for index, (start, stop) in enumerate(bounds))
