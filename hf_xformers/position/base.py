"""The position contract.

A position component acts in one or more of six ways (`PositionSpec.acts`):

- `input`: adds to (or transforms) the embedded input, once: [`Position.embed`];
- `layer_input`: adds to the input of every layer: [`Position.embed_layer`];
- `rotation`: rotates queries and keys: [`Position.rotation`];
- `score_bias`: adds to attention scores a function of (query, key, positions) that can be evaluated on any block of
  pairs: [`Position.score_bias`];
- `score_terms`: adds to attention scores terms that depend on the queries and keys themselves, with parameters in
  every
  layer: [`PositionSpec.build_terms`], [`LayerTerms.scores`];
- `head_terms`: adds to every layer's queries, keys and values: [`PositionSpec.build_terms`], [`LayerTerms.heads`].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..core.components import Spec
from ..core.context import LayerContext
from ..core.weight_decay import Undecayed
from ..ops.common.real_tokens import real_places
from ..ops.score_terms.terms import Pairs, QueryBlock

# Under which names the rotations of a call stand in `context.shared`, and whether it is that of local layers.
ROTATIONS = (("rotation", False), ("local_rotation", True))


class Rotation(Protocol):
    """Rotates per-head queries or keys [B, H, T, d] that stand at the positions it was made for.

    values: values are rotated as well. by_length: a longer text turns the same token otherwise, so that a cache keeps
    keys as they are and all of them are turned in every call.
    """

    values: bool
    by_length: bool

    def __call__(self, heads: Tensor) -> Tensor: ...

    def of_last(self, count: int) -> Rotation:
        """The same for the last `count` of its tokens."""
        ...


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

    def share_rotations(self, context: LayerContext, like: Tensor) -> None:
        """Makes the rotations for the tokens of a call; [`Attention.rotation`] reads them."""
        for name, local in ROTATIONS[: 2 if self.has_local else 1]:
            made = self.rotation(context.positions, like, local=local)
            if made is None:
                continue
            context.shared[name] = made
            if made.by_length and not context.fresh:
                tokens = context.positions.amax(-1) + 1
                context.shared[f"{name}_of_keys"] = self.rotation(key_positions(context), like, tokens, local)

    def score_bias(self) -> ScoreBias | Position | None:
        """What attention reads from this module, in `context.shared["score_bias"]`: the additive score term (act
        `score_bias`), or the module whose tables all [`LayerTerms`] share; None if neither."""
        return None


class LayerTerms(nn.Module):
    """What a position adds inside the attention of one layer: score_ij = scale * q_i k_j + scores_ij, and
    o_i = sum_j w_ij v_j + values_i. It stands on the attention module, so each layer has parameters of its own.

    content_scale: factor on the attention's own scale. changes_scores: whether scores and values get terms (act
    `score_terms`) or queries, keys and values alone (`head_terms`). has_values: whether values get terms. separable:
    scores are products of [`LayerTerms.by_query`] and [`LayerTerms.by_key`], one tensor each, and a number for each
    distance.

    Scores are made for some heads and some queries at a time, and again in the backward pass, so the methods for them
    are pure functions: whatever has a gradient comes in as an argument. `h` stands for the heads that are asked for.
    """

    content_scale: float = 1.0
    changes_scores: bool = True
    has_values: bool = False
    separable: bool = False

    def prepare(self, context: LayerContext) -> None:
        """Called once per call and layer before the first layer runs: put into `context.streams` what layers share and
        is no parameter, under a key that names it, unless it is there already."""

    def heads(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, H, T, d], key and value [B, K, T, d] of the current tokens, before they enter the cache -> the
        same with what the position adds."""
        return query, key, value

    def tables(self, attention: Any, scale: float, context: LayerContext) -> tuple[Tensor, ...]:
        """What is made once per layer and call and has no axis of pairs, [H or 1, ...] each: all parameters that the
        methods below read, or what is made of them. attention: the module that this stands on, whose projections may
        be shared;
        scale: the factor on content scores."""
        return ()

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...], context: LayerContext) -> tuple[Tensor, ...]:
        """query [B, h, T, d] (scaled) -> what belongs to queries, [B or 1, h, T, n] each."""
        return ()

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...], context: LayerContext) -> tuple[Tensor, ...]:
        """key [B, h, S, d] -> what belongs to keys and all blocks of queries read, [B or 1, h, S, n] each."""
        return ()

    def by_distance(self, tables: tuple[Tensor, ...], context: LayerContext) -> tuple[Tensor, ...]:
        """What belongs to distances and all blocks of queries read, [1, h, distances, n] each (not where
        `separable`)."""
        return ()

    def line(self, tables: tuple[Tensor, ...], context: LayerContext) -> Tensor | None:
        """A number for each distance (key - query) from the last query and the first key on, [h, T + S - 1], if scores
        get one (only where `separable`)."""
        return None

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """The terms of a block of pairs, [B or 1, h, t, s], a tensor of its own that the caller may overwrite (not
        where `separable`)."""
        raise NotImplementedError

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice, context: LayerContext) -> Tensor:
        """weights [B, h, t, s] of the queries `rows` and the first s keys -> what is added to the output, [B, h, t,
        d]."""
        raise NotImplementedError

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """The same terms for any pairs, as sparse mechanisms need them, broadcastable to [B, h, n, t, s] (not where
        `separable`)."""
        raise NotImplementedError

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """weights [B, h, n, t, s] of any pairs -> what is added to the output, [B, h, n, t, d]."""
        raise NotImplementedError


class PositionSpec(Spec):
    """Base of position specs.

    acts: the ways in which the component acts (see this module's text). extrapolates: whether positions beyond the
    training length are defined. needs_causal: refused in an encoder. shares_tables: its terms in every layer read
    tables that its one module holds ([`Position.score_bias`]). knows_insertion: tokens may come in the order of their
    generation and stand elsewhere in the text.
    """

    acts: ClassVar[frozenset[str]] = frozenset()
    extrapolates: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = False
    shares_tables: ClassVar[bool] = False
    knows_insertion: ClassVar[bool] = False

    def max_length(self, config) -> int | None:
        """Longest sequence (tokens) that positions exist for; None without a limit."""
        return None

    @property
    def has_local(self) -> bool:
        """Whether layers may have a rotation of a second kind (`angles="local"` of their attention)."""
        return False

    def shared_sizes(self, config) -> tuple:
        """What has to be alike in all layers of a tower, because they read the same tables."""
        rotation = (config.head_width,) if "rotation" in self.acts else ()
        return rotation + ((config.num_attention_heads,) if "score_bias" in self.acts else ())

    def build_terms(self, config, layer_idx: int) -> LayerTerms:
        """What stands on the attention of layer `layer_idx` (acts `score_terms` and `head_terms`)."""
        raise NotImplementedError(f"position {self.type!r} adds nothing inside attention.")


def key_positions(context: LayerContext) -> Tensor:
    """Positions of all keys, [B or 1, S]: those of the current tokens where nothing is cached; else real tokens
    counted from 0, as positions are unless the caller chooses others. Keys may be fewer than the tokens that the
    padding mask covers, where a cache forgets what is out of reach."""
    if context.fresh:
        return context.positions
    if context.padding_mask is None:
        return context.key_index[None]
    return real_places(context.padding_mask)[:, context.key_index]
