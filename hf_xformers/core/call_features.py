# SPDX-License-Identifier: Apache-2.0
"""What a call may have and the vanilla Transformer has not. A tower knows none of it by name: each stands next to its
mechanism, and is asked in turn."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .call import Call


class CallFeature:
    """The part that a mechanism has in every call of its tower; the defaults do nothing."""

    def moves(self, mask: Tensor, tokens: Tensor) -> Any:
        """Where the tokens [B, T, ...] of a call with this mask [B, T] go before layers see them
        ([`Moves`](holes.py)); None: it leaves them."""
        return None

    def positions(self, positions: Tensor) -> Tensor:
        """Positions [B or 1, T] in the text -> those that the position component reads."""
        return positions

    def enter(self, context: Call, tower: Any) -> None:
        """Called before the position is prepared: adds to the call."""

    def leave(self, result: Any) -> dict[str, Any]:
        """Fields of the tower's output that are taken out of the stack's."""
        return {}


@runtime_checkable
class HasCallFeature(Protocol):
    """The spec of a stack or an attention whose mechanism has a part in calls."""

    def call_feature(self, config: Any) -> CallFeature:
        """Made once for a tower of this config."""


def features_of(config: Any) -> tuple[CallFeature, ...]:
    """One of each type, the stack's first."""
    specs = [config.stack, *(layer.attention for layer in config.layer_configs())]
    found = [spec.call_feature(config) for spec in specs if isinstance(spec, HasCallFeature)]
    return tuple({type(feature): feature for feature in found}.values())
