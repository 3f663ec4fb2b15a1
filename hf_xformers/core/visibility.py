# SPDX-License-Identifier: Apache-2.0
"""Who may attend to whom: padding, documents, causal order and prepared masks together, for all pairs or some."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.common.real_tokens import real_first
from .call import Call
from .prepared import Prepared, State


class BooleanMask(Prepared):
    """[`boolean_mask`] of a call."""

    mask: Tensor | None


class DenseBias(State):
    """What is added to the scores of all pairs, [B or 1, H, T, S]."""

    matrix: Tensor


class VisiblePairs(Prepared):
    """[`visible_pairs`] of a call."""

    mask: Tensor | None


class RealFirst(Prepared):
    """[`tokens_in_order`] of a call."""

    order: Tensor


def boolean_mask(context: Call) -> Tensor | None:
    """Who may attend to whom, [B or 1, 1, T or 1, S], True = may; None if everybody may, or if plain causal order is
    all there is (the kernels' own `is_causal`)."""
    mask = context.explicit_mask
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    queries, keys = context.query_index, context.key_index
    padding, segments = context.padding_mask, context.segment_ids
    if padding is not None:
        mask = padding[:, None, None, :]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    if not context.causal or (queries.shape[0] == 1 and not context.static):
        return mask  # a single query is the last token: it sees all that is there
    if mask is None and context.fresh:
        return None
    order = (keys[None, :] <= queries[:, None])[None, None]
    return order if mask is None else mask & order


def mask_of_call(context: Call) -> Tensor | None:
    """[`boolean_mask`], made once per call."""
    return context.prepare(BooleanMask, lambda: BooleanMask(boolean_mask(context))).mask


def visible_pairs(context: Call, cross: bool = False) -> Tensor | None:
    """Who may attend to whom, [B or 1, 1 or H, T or 1, S] boolean, the causal order included; None if everybody
    may."""
    if cross:
        padding = context.memory_padding_mask
        return None if padding is None else padding[:, None, None, :]
    return context.prepare(VisiblePairs, lambda: VisiblePairs(_visible_pairs(context))).mask


def _visible_pairs(context: Call) -> Tensor | None:
    mask = boolean_mask(context)
    if mask is None and context.causal and context.query_index.shape[0] > 1:
        mask = (context.key_index[None, :] <= context.query_index[:, None])[None, None]
    return mask


def visible_block(context: Call, cross: bool, rows: slice, keys: slice, order: bool = True) -> Tensor | None:
    """The part of [`visible_pairs`] for some queries and some keys, made without making the whole; `order=False`:
    without the causal order, which the caller sees to."""
    if cross:
        padding = context.memory_padding_mask
        return None if padding is None else padding[:, None, None, keys]
    mask = context.explicit_mask
    if mask is not None:
        mask = mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
        return mask if mask.dtype == torch.bool else mask == 0
    if context.padding_mask is not None:
        mask = context.padding_mask[:, None, None, keys]
    if context.segment_ids is not None:
        same = context.segment_ids[:, None, rows, None] == context.segment_ids[:, None, None, keys]
        mask = same if mask is None else mask & same
    if context.causal and order:
        earlier = context.key_index[None, keys] <= context.query_index[rows, None]
        mask = earlier[None, None] if mask is None else mask & earlier
    return mask


def tokens_in_order(context: Call) -> Tensor | None:
    """The slots [B, S] of the keys, real ones first, each as they stand; None: none is padding."""
    mask = context.padding_mask
    return None if mask is None else context.prepare(RealFirst, lambda: RealFirst(real_first(mask))).order


def rows_can_be_empty(context: Call, cross: bool = False) -> bool:
    """Whether some query may see nothing at all. By causal order alone that never happens: a token sees itself."""
    if cross:
        return context.memory_padding_mask is not None
    return context.padding_mask is not None or context.explicit_mask is not None


def last_key(context: Call, cross: bool, num_keys: int, stop: int) -> int:
    """How many of `num_keys` keys the queries before `stop` can see at most."""
    if cross or not context.causal or context.static:
        return num_keys
    return num_keys - context.query_index.shape[0] + stop
