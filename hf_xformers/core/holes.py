# SPDX-License-Identifier: Apache-2.0
"""Texts with padding between their tokens, as peft makes them of its virtual tokens and a text padded on the left.

Mechanisms count distances, windows and neighbors in slots, which are tokens where those of a row stand side by side.
So a tower moves the tokens of such rows together before its layers see them, and its results back. In a cache that is
continued tokens stand last, in the order of the text, wherever the caller's mask has its padding. Behind a text padded
on the right a cache of keys and values is brought to that when a later call needs it; one that drops tokens is
filled so at once.

A stack may want all padding behind its tokens, and is given it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..ops.common.real_tokens import real_first, real_last
from .cache import RecurrentStateLayer, SummaryLayer
from .call import can_inspect
from .call_features import CallFeature

_MOVED = "tokens_stand_last"  # of a cache, once a call has moved tokens; else its slots stand as the mask has them


class Moves(NamedTuple):
    """Where a call's tokens go.

    Args:
        mask: [B, S], real tokens as layers see them.
        order: [B, T], the current tokens in the order in which layers see them; None: as given.
        keys: [B, S], all slots in that order.
        after: [B, S], the order in which a cache has to keep the slots of this call; None: as it is.
    """

    mask: Tensor
    order: Tensor | None
    keys: Tensor
    after: Tensor | None

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of single tokens, [B, T, ...] or positions [1, T] or [T], in the layers' order; others as they
        are."""
        found, order = dict(inputs), self.order
        if order is None:
            return found
        for name, value in inputs.items():
            if name == "position_ids" and value is not None:
                value = value.expand(len(order), -1)
            if isinstance(value, Tensor) and value.shape[:2] == order.shape:
                found[name] = take(value, order)
        return found

    def restore(self, output: Any) -> None:
        """Brings what a tower gives for each token back to the caller's order. What is shorter or longer than the
        text stays, with its own padding mask."""
        keys = self.keys.argsort(-1)
        if output.attentions is not None:
            output.attentions = tuple(_of_keys(self._rows(one, 2), keys) for one in output.attentions)
        if self.order is None:
            return
        if output.last_hidden_state.shape[1] == self.order.shape[1]:
            output.last_hidden_state = self._rows(output.last_hidden_state, 1)
            if output.padding_mask is not None:
                output.padding_mask = _of_keys(output.padding_mask, keys)
            if output.memories is not None:
                output.memories = self._rows(output.memories, 2)
        for name, axis in (("hidden_states", 1), ("cross_attentions", 2)):
            if getattr(output, name) is not None:
                setattr(output, name, tuple(self._rows(one, axis) for one in getattr(output, name)))

    def _rows(self, tensor: Tensor, axis: int) -> Tensor:
        if self.order is None or tensor is None or tensor.shape[axis] != self.order.shape[1]:
            return tensor
        return take(tensor, self.order.argsort(-1), axis)


def take(tensor: Tensor, order: Tensor, axis: int = 1) -> Tensor:
    """tensor [B, ..., T, ...] with its axis `axis` in the order [B, T] of each row."""
    if tensor.shape[0] == 1 != order.shape[0]:
        tensor = tensor.expand(order.shape[0], *tensor.shape[1:])
    shape = [1] * tensor.ndim
    shape[0], shape[axis] = order.shape
    return tensor.gather(axis, order.view(shape).expand(*tensor.shape[:axis], -1, *tensor.shape[axis + 1 :]))


def _of_keys(tensor: Tensor, keys: Tensor) -> Tensor:
    fits = tensor is not None and tensor.shape[-1] == keys.shape[-1]
    return take(tensor, keys.to(tensor.device), tensor.ndim - 1) if fits else tensor


def _has_holes(mask: Tensor) -> Tensor:
    """A single boolean: whether in any row of the mask [B, S] padding stands between real tokens."""
    begins = torch.cat((mask[:, :1], mask[:, 1:] & ~mask[:, :-1]), dim=1)
    return (begins.sum(-1) > 1).any()


def _falls(mask: Tensor) -> Tensor:
    """Whether in any row padding stands behind a real token."""
    return (mask[:, :-1] & ~mask[:, 1:]).any()


def _refuse_holes(mask: Tensor, length: int) -> None:
    """For static caches: their later steps are recorded as graphs, which cannot look for holes. Looks at the mask,
    [B, S] or prepared, of a text of more than one token."""
    if length == 1 or mask.ndim not in (2, 4):
        return
    last = mask if mask.ndim == 2 else mask[:, 0, -1]
    if bool(_has_holes(last != 0 if mask.ndim == 2 or last.dtype == torch.bool else last == 0)):
        raise ValueError(
            "Padding stands between the tokens of a row, as behind virtual tokens of peft, where a static cache has no"
            " place for it; leave `cache_implementation` out, or give each row in a call of its own."
        )


def moves(mask: Tensor, cached: int, drops: bool) -> Moves | None:
    """What a call has to move, by its mask [B, S] of `cached` slots and of current ones; None: nothing. drops: whether
    it fills a cache that keeps a part of the slots alone."""
    before, now = mask[:, :cached], mask[:, cached:]
    if not cached:
        if not bool(_has_holes(mask) | _falls(mask) if drops else _has_holes(mask)):
            return None
        every = real_last(now)
        return Moves(now.gather(1, every), every, every, None)
    first = real_last(before)
    known = torch.cat((before.gather(1, first), now), dim=1)
    scattered, behind = torch.stack((_falls(before), _falls(known))).tolist()  # one wait for the device
    if not (scattered or behind):
        return None
    order = real_first(now) if behind else None
    keys = torch.arange(now.shape[1], device=mask.device).expand_as(now) if order is None else order
    keys = torch.cat((first, cached + keys), dim=1)
    seen = mask.gather(1, keys)
    return Moves(seen, order, keys, real_last(seen) if behind else None)


class PaddingBehind(CallFeature):
    """Of a stack without a cache that wants padding behind each row's tokens."""

    def moves(self, mask: Tensor, tokens: Tensor) -> Moves | None:
        """None: nothing has to move, or the mask says it of no tokens."""
        if mask.shape != tokens.shape[:2]:
            return None
        mask = mask.to(tokens.device) != 0
        if can_inspect() and not bool((~mask[:, :-1] & mask[:, 1:]).any()):
            return None
        order = real_first(mask)
        return Moves(mask.gather(1, order), order, order, None)


def movable(layer: Any) -> bool:
    """Whether the slots of a cache layer can be put into another order, or padding leaves no trace in it."""
    if isinstance(layer, RecurrentStateLayer):
        return not layer.by_slot
    return type(layer) in (DynamicLayer, SummaryLayer)


def moves_of_call(mask: Tensor, tokens: Tensor, cache: Cache | None, drops_slots: bool) -> Moves | None:
    """What a call has to move; None: nothing, or a mask that says it of no tokens. mask: [B, T] or [B, cached + T];
    tokens: [B, T, ...]. drops_slots: whether the cache that the call fills, where none is given, keeps a part alone.

    Raises:
        ValueError: a static cache, where something would have to move.
    """
    (rows, length), cached = tokens.shape[:2], 0
    if cache is not None:
        if cache.is_compileable:
            _refuse_holes(mask, length)
            return None
        cached, drops_slots = cache.get_seq_length(), not all(map(movable, cache.layers))
        if not cached:
            vars(cache).pop(_MOVED, None)  # it may have held other texts
    if mask.ndim != 2:
        return None
    mask = mask.to(tokens.device) != 0
    if mask.shape[1] == length and cached:
        mask = torch.cat([mask.new_ones(rows, cached), mask], dim=1)
    return moves(mask, cached, drops_slots) if mask.shape == (rows, cached + length) else None


def make_ready(cache: Cache, moved: Moves) -> None:
    """Before a call that moves tokens: cached ones stand last."""
    cached = cache.get_seq_length()
    if cached and not getattr(cache, _MOVED, False):
        _reorder(cache, moved.keys[:, :cached])


def settle(cache: Cache, moved: Moves) -> None:
    """After such a call: so do its own."""
    setattr(cache, _MOVED, True)
    if moved.after is not None:
        _reorder(cache, moved.after)


def _reorder(cache: Cache, order: Tensor) -> None:
    """Brings the slots of a cache into the order [B, S].

    Raises:
        ValueError: a layer that has dropped some of them, or keeps them in another form.
    """
    for layer in cache.layers:
        if not movable(layer):
            raise ValueError(
                f"Padding stands between cached and new tokens, which a {type(layer).__name__} cannot move apart"
                " again; give each row in a call of its own, or all tokens in one call without `past_key_values`."
            )
        held: Any = layer
        if isinstance(layer, DynamicLayer) and held.keys is not None and held.keys.numel():
            held.keys, held.values = take(held.keys, order, 2), take(held.values, order, 2)
