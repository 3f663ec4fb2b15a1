"""The position contract.

A position component acts in one or more of four ways (`PositionSpec.acts`):

- `input`: adds to (or transforms) the embedded input, once: [`Position.embed`];
- `layer_input`: adds to the input of every layer: [`Position.embed_layer`];
- `rotation`: rotates queries and keys: [`Position.rotation`];
- `score_bias`: adds to attention scores a function of (query, key, positions) that can be evaluated on any block of
  pairs: [`Position.score_bias`].
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor, nn

from ..components import Spec


class Rotation(Protocol):
    """Rotates per-head queries or keys [B, H, T, d] that stand at the positions it was made for."""

    def __call__(self, heads: Tensor) -> Tensor: ...


class ScoreBias(Protocol):
    """An additive score term that can be evaluated on any block of pairs."""

    def block(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        """query_index [..., Tq], key_index [..., Tk] (slots) -> bias [..., H, Tq, Tk]."""
        ...


class Position(nn.Module):
    """Base of position modules; the defaults do nothing."""

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """hidden_states [B, T, D], positions [B or 1, T] -> [B, T, D]; applied once, before the first layer."""
        return hidden_states

    def embed_layer(self, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """The same for the input of the layer that runs at depth `step`."""
        return hidden_states

    def rotation(self, positions: Tensor, like: Tensor) -> Rotation | None:
        """The rotation for tokens at `positions` [B or 1, T]; tables in the dtype and on the device of `like`."""
        return None

    def score_bias(self) -> ScoreBias | None:
        """The additive score term, or None."""
        return None


class PositionSpec(Spec):
    """Base of position specs.

    acts: the ways in which the component acts (see this module's text). extrapolates: whether positions beyond the
    training length are defined. needs_causal: refused in an encoder.
    """

    acts: ClassVar[frozenset[str]] = frozenset()
    extrapolates: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = False

    def max_length(self, config) -> int | None:
        """Longest sequence (tokens) that positions exist for; None without a limit."""
        return None
