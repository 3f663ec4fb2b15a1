# SPDX-License-Identifier: Apache-2.0
"""The position contract.

A position component acts in one or more of six ways (`PositionSpec.acts`):

- `input`: adds to (or transforms) the embedded input, once: [`Position.embed`];
- `layer_input`: adds to the input of every layer: [`Position.embed_layer`];
- `rotation`: rotates queries and keys: [`Position.rotation`];
- `score_bias`: adds to attention scores a function of (query, key, positions) that can be evaluated on any block of
  pairs: [`Position.score_bias`];
- `score_terms`: adds to attention scores terms that depend on the queries and keys themselves, with parameters in
  every layer: [`PositionSpec.build_terms`], [`PositionTerms.score_terms`];
- `head_terms`: adds to every layer's queries, keys and values: [`PositionSpec.build_terms`], [`PositionTerms.heads`].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import Spec
from ..core.prepared import Prepared, State
from ..core.weight_decay import Undecayed
from ..ops.common.real_tokens import real_places
from .distances import distances_of_block
from .score_terms import BiasByDistance, BiasOfPairs, SelfAttentionTerms


class Rotation(ABC):
    """Rotates per-head queries or keys [B, H, T, d] that stand at the positions it was made for.

    values: whether values are rotated as well. by_length: a longer text turns the same token otherwise, so that a
    cache keeps keys as they are and all of them are turned in every call.
    """

    values: bool = False
    by_length: bool = False

    @abstractmethod
    def __call__(self, heads: Tensor) -> Tensor:
        """[B, H, T, d] -> the same, rotated."""

    @abstractmethod
    def of_last(self, count: int) -> Rotation:
        """The same for the last `count` of its tokens."""


class ScoreBias(ABC):
    """An additive score term that can be evaluated on any block of pairs. [`ScoreBias.block`] is all that a bias must
    offer.

    relative: whether it is a function of the distance alone. Mechanisms then evaluate it once for each distance
    ([`ScoreBias.by_distance`]) and not for each pair.
    """

    relative: ClassVar[bool] = False

    @abstractmethod
    def block(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        """query_index [..., Tq], key_index [..., Tk] (slots) -> bias [..., H, Tq, Tk]."""

    def by_distance(self, distance: Tensor) -> Tensor:
        """distance (key - query) [...] -> bias [H, ...], where `relative`."""
        flat = distance.flatten()
        return self.block(torch.zeros_like(flat[:1]), flat).squeeze(-2).unflatten(-1, distance.shape)

    def score_terms(self, heads: int, scale: float, context: Call) -> SelfAttentionTerms:
        """This bias for all `heads` as engines with score terms read it."""
        if self.relative:
            line = self.by_distance(distances_of_block(context, slice(None), context.key_index.shape[0]))
            return BiasByDistance(scale, (line,), context)
        numbers = torch.arange(heads, device=context.key_index.device)[:, None]
        return BiasOfPairs(scale, (numbers,), context, self.block)


class Turns(Prepared):
    """The rotations of a call's tokens and of all keys, in a slot for each `angles` of attention."""

    tokens: Rotation
    keys: Rotation


class CallBias(Prepared):
    """What the position adds to scores."""

    bias: ScoreBias


class PositionTables(Prepared):
    """The module whose tables all [`PositionTerms`] read."""

    module: Any


class TokenNumbers(State):
    """A number for each head and token, [B, H, T] of the current tokens as [`PositionTerms.of_states`] gives them,
    then of all so far, in float32 at least."""

    numbers: Tensor


class Position(Undecayed, nn.Module):
    """Base of position modules; the defaults do nothing."""

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """hidden_states [B, T, D], positions [B or 1, T] -> [B, T, D]; applied once, before the first layer."""
        return hidden_states

    def embed_layer(self, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """The same for the input of the layer that runs at depth `step`."""
        return hidden_states

    has_local: bool = False  # whether layers may ask for a second rotation

    def rotation(
        self, positions: Tensor, like: Tensor, tokens: Tensor | None = None, local: bool = False
    ) -> Rotation | None:
        """The rotation for tokens at `positions` [B or 1, T]; tables in the dtype and on the device of `like`. tokens
        [B or 1]: of each text so far (None: up to the last of `positions`); local: the one for layers whose attention
        has `angles="local"`."""
        return None

    def share_rotations(self, context: Call, like: Tensor) -> None:
        """Makes the rotations for the tokens of a call; [`Attention.rotation`] reads them."""
        for angles in ("global", "local") if self.has_local else ("global",):
            local = angles == "local"
            made = of_keys = self.rotation(context.positions, like, local=local)
            if made is not None and made.by_length and not context.fresh:
                tokens = context.positions.amax(-1) + 1
                of_keys = self.rotation(key_positions(context), like, tokens, local)
            if made is not None and of_keys is not None:
                context.keep(Turns(made, of_keys), angles)

    def share(self, context: Call, like: Tensor) -> None:
        """Puts all that attention reads of this module into a call."""
        self.share_rotations(context, like)
        bias, tables = self.score_bias(), self.shared_tables()
        if bias is not None:
            context.keep(CallBias(bias))
        if tables is not None:
            context.keep(PositionTables(tables))

    def score_bias(self) -> ScoreBias | None:
        """The additive score term (act `score_bias`)."""
        return None

    def shared_tables(self) -> Position | None:
        """The module whose tables all [`PositionTerms`] share (`shares_tables` of the spec)."""
        return None


class PositionActs:
    """A position component as embeddings are given it: no module, as what hooks the calls of modules, such as
    Accelerate, moves modules among their arguments to another device."""

    def __init__(self, position: Position) -> None:
        self.embed = position.embed


class PositionTerms(nn.Module):
    """What a position has on the attention of one layer, with parameters of that layer's own.

    It may change queries, keys and values ([`PositionTerms.heads`], act `head_terms`), and add to scores and values
    ([`PositionTerms.score_terms`], act `score_terms`).

    content_scale: factor on the attention's own scale. changes_scores: whether scores and values get terms, or
    queries, keys and values alone. Where [`PositionTerms.of_states`] gives [`TokenNumbers`], attention keeps them
    next to keys (`token_numbers` of its spec's `supports`).
    """

    content_scale: float = 1.0
    changes_scores: bool = True

    def prepare(self, context: Call) -> None:
        """Called once per call and layer before the first layer runs: give the call
        what layers share and is no parameter (`context.start`), unless it is there already."""

    def of_states(self, hidden_states: Tensor, context: Call) -> Call:
        """The call as the attention of this layer sees it; hidden_states [B, T, D]: its input, before projections."""
        return context

    def heads(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, H, T, d], key and value [B, K, T, d] of the current tokens, before they enter the cache -> the
        same with what the position adds."""
        return query, key, value

    def score_terms(self, attention: Any, scale: float, context: Call) -> SelfAttentionTerms:
        """What is added to scores and values in this call (only where `changes_scores`). attention: the module that
        this stands on, whose projections may be shared; scale: the factor on the products of queries and keys."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it adds to scores.")


class PositionSpec(Spec):
    """Base of position specs.

    Attributes:
        acts: the ways in which the component acts (see this module's text).
        needs_causal: refused in an encoder.
        shares_tables: its terms in every layer read tables that its one module holds ([`Position.shared_tables`]).
        any_width: what it adds to the input has the width at which the embedding adds positions
            (`EmbeddingSpec.position_width`), which may be other than `hidden_size`.
    """

    acts: ClassVar[frozenset[str]] = frozenset()
    needs_causal: ClassVar[bool] = False
    shares_tables: ClassVar[bool] = False
    any_width: ClassVar[bool] = False

    def max_length(self, config: Any) -> int | None:
        """Longest sequence (tokens) that positions exist for; None without a limit."""
        return None

    @property
    def has_local(self) -> bool:
        """Whether layers may have a rotation of a second kind (`angles="local"` of their attention)."""
        return False

    def turns_by_length(self, angles: str) -> bool:
        """Whether the rotation of layers with these `angles` depends on how many tokens a text has so far
        ([`Rotation.by_length`])."""
        return False

    def shared_sizes(self, config: Any) -> tuple:
        """What has to be alike in all layers of a tower, because they read the same tables."""
        rotation = (config.attention.rotated_width(config),) if "rotation" in self.acts else ()
        return rotation + ((config.num_attention_heads,) if "score_bias" in self.acts else ())

    def build_terms(self, config: Any, layer_idx: int) -> PositionTerms:
        """What stands on the attention of layer `layer_idx` (acts `score_terms` and `head_terms`)."""
        raise NotImplementedError(f"position {self.type!r} adds nothing inside attention.")


def key_positions(context: Call) -> Tensor:
    """Positions of all keys, [B or 1, S]: those of the current tokens where nothing is cached; else real tokens
    counted from 0, as positions are unless the caller chooses others. Keys may be fewer than the tokens that the
    padding mask covers, where a cache forgets what is out of reach."""
    if context.fresh:
        return context.positions
    if context.padding_mask is None:
        return context.key_index[None]
    return real_places(context.padding_mask)[:, context.key_index]
