# SPDX-License-Identifier: Apache-2.0
"""Several positions at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from ..core.components import build_spec, register
from ..core.hand_overs import HandOver
from .base import Position, PositionSpec, PositionTerms, Rotation, ScoreBias

_AT_INPUTS = frozenset({"input", "layer_input"})


class CombinedPosition(Position):
    """Each part does what it does alone: those at the inputs one after the other, then the one inside attention."""

    def __init__(self, config, spec: CombinedSpec):
        super().__init__()
        self.parts = nn.ModuleList(part.build(config) for part in spec.parts)
        self.has_local = spec.has_local

    def _parts(self) -> Iterator[Position]:
        return (cast(Position, part) for part in self.parts)

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        for part in self._parts():
            hidden_states = part.embed(hidden_states, positions)
        return hidden_states

    def embed_layer(self, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        for part in self._parts():
            hidden_states = part.embed_layer(hidden_states, positions, step)
        return hidden_states

    def rotation(
        self, positions: Tensor, like: Tensor, tokens: Tensor | None = None, local: bool = False
    ) -> Rotation | None:
        found = (part.rotation(positions, like, tokens, local) for part in self._parts())
        return next((rotation for rotation in found if rotation is not None), None)

    def score_bias(self) -> ScoreBias | None:
        found = (part.score_bias() for part in self._parts())
        return next((bias for bias in found if bias is not None), None)

    def shared_tables(self) -> Position | None:
        found = (part.shared_tables() for part in self._parts())
        return next((tables for tables in found if tables is not None), None)


@register("position", "combined")
class CombinedSpec(PositionSpec):
    """Absolute positions next to relative ones, as in MPNet (Song et al. 2020, arXiv 2004.09297: learned absolute
    positions and T5's bias) or DeBERTa with `position_biased_input`.

    parts: two positions or more (names, dicts or specs), at most one of which acts inside attention; the others act on
    the input, of the first layer or of all.
    """

    summary = "several positions at once: on inputs, and one inside attention"

    parts: tuple[Any, ...] = ("learned_absolute", "t5_relative_bias")

    def __post_init__(self) -> None:
        self.parts = tuple(build_spec("position", part) for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, "parts": [part.to_dict() for part in self.parts]}

    def check_fields(self) -> None:
        names = ", ".join(repr(part.type) for part in self.parts)
        if len(self.parts) < 2 or any(not part.acts or part.type == self.type for part in self.parts):
            raise ValueError(
                f"position 'combined' has two `parts` at least, each a position that does something and not"
                f" 'combined' again, got {names or 'none'}; use a position alone by its own name."
            )
        inside = [part.type for part in self.parts if part.acts - _AT_INPUTS]
        if len(inside) > 1:
            raise ValueError(
                f"position 'combined' has one part at most that acts inside attention, got"
                f" {' and '.join(map(repr, inside))}; leave all but one of them out."
            )

    def check(self, config) -> None:
        for part in self.parts:
            part.check(config)

    # What a part can do alone, or all of them.

    @property
    def acts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(part.acts for part in self.parts))

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(name for part in self.parts for name in part.inputs))

    @property
    def reads(self) -> frozenset[HandOver]:  # type: ignore[override]
        return frozenset().union(*(part.reads for part in self.parts))

    @property
    def needs_causal(self) -> bool:  # type: ignore[override]
        return any(part.needs_causal for part in self.parts)

    @property
    def shares_tables(self) -> bool:  # type: ignore[override]
        return any(part.shares_tables for part in self.parts)

    @property
    def any_width(self) -> bool:  # type: ignore[override]
        return all(part.any_width for part in self.parts if "input" in part.acts)

    @property
    def tensor_parallel(self) -> bool:  # type: ignore[override]
        return all(part.tensor_parallel for part in self.parts)

    @property
    def has_local(self) -> bool:
        return any(part.has_local for part in self.parts)

    def turns_by_length(self, angles: str) -> bool:
        return any(part.turns_by_length(angles) for part in self.parts)

    @property
    def layers_apart(self) -> bool:  # type: ignore[override]
        return all(part.layers_apart for part in self.parts)

    @property
    def supports(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset.intersection(*(part.supports for part in self.parts))

    def max_length(self, config) -> int | None:
        limits = [limit for part in self.parts if (limit := part.max_length(config)) is not None]
        return min(limits, default=None)

    def shared_sizes(self, config) -> tuple:
        return tuple(size for part in self.parts for size in part.shared_sizes(config))

    def build(self, config, **where) -> CombinedPosition:
        return CombinedPosition(config, self)

    def build_terms(self, config, layer_idx: int) -> PositionTerms:
        inside = next(part for part in self.parts if part.acts - _AT_INPUTS)
        return inside.build_terms(config, layer_idx)
