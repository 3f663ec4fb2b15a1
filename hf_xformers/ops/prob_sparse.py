# SPDX-License-Identifier: Apache-2.0
"""ProbSparse attention: queries whose scores stand out attend to all keys, the others take the mean of all values.

How far the scores of a query stand out is measured on a few keys (Zhou et al. 2021, arXiv 2012.07436, section 3.1).
Which ones follows from a seed and from the query's place among the real tokens of its row, so that neither other rows
nor padding, nor an earlier call, changes them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .common.products import wide_products, widened
from .common.real_tokens import real_first, real_places
from .common.segments import accumulation_dtype

_NUMBERS_AT_ONCE = {"cpu": 2**20}
_NUMBERS_AT_ONCE_ELSEWHERE = 2**26
_LOW = 0xFFFFFFFF


class ActiveQueries(NamedTuple):
    """places: [B, H, u], the slots of the queries that stand out most, first to last. used: [B, 1, u], which of these
    a row has; None: all."""

    places: Tensor
    used: Tensor | None


def budget(length: int, factor: int) -> int:
    """min(c ceil(ln n), n) of `length` tokens n, at least 1: keys sampled for a query, and queries that are active."""
    return min(max(factor * math.ceil(math.log(length)), 1), length) if length else 0


def _room(length: int, factor: int) -> int:
    """[`budget`]; in a graph for every length all tokens, of which a mask leaves each row its own budget."""
    return length if isinstance(length, torch.SymInt) else budget(length, factor)


def budgets(counts: Tensor, factor: int) -> Tensor:
    """[`budget`] of each number of `counts`."""
    # Whole numbers n with ceil(ln n) > k are those above e^k, which float64 tells apart at any length.
    steps = torch.exp(torch.arange(40, device=counts.device, dtype=torch.float64)).floor().long()
    return torch.minimum((factor * (counts[..., None] > steps).sum(-1)).clamp(min=1), counts)


def sampled_keys(places: Tensor, number: int, counts: Tensor, seed: int) -> Tensor:
    """places [...] of queries among their row's real tokens -> the places of the keys that each is measured on [...,
    number]: uniform among `counts` [...] tokens, with replacement, a function of place and seed alone."""
    sample = torch.arange(number, device=places.device)
    # The finaliser of MurmurHash3 over a counter; products wrap round, and their low half is right all the same.
    mixed = (places.long()[..., None] * 0x9E3779B1 + sample * 0x85EBCA77 + seed) & _LOW
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _LOW
    mixed = mixed ^ (mixed >> 16)
    return (mixed * counts.clamp(min=1)[..., None]) >> 32


@torch.no_grad()
def measured(query: Tensor, key: Tensor, mask: Tensor | None, factor: int, seed: int) -> Tensor:
    """M_i = max_j q_i k_j - (1 / n) sum_j q_i k_j over the U = [`budget`] keys j sampled for query i, n real tokens in
    the row (section 3.1, with the sum divided by the number of all keys, as the released code does).

    query, key: [B, H, T, d]; mask: [B, T], True = real -> [B, H, T], float32 at least; -inf for padding. Time O(T U
    d); a part of the queries is worked on at a time, so that memory is O(T). A graph for every length, which needs a
    mask, takes the samples out of all scores, in memory O(T^2).
    """
    batch, heads, length, width = query.shape
    number, device = _room(length, factor), query.device
    slots = torch.arange(length, device=device)
    rows = key.transpose(1, 2).reshape(batch * length, heads, width)
    first = torch.arange(batch, device=device)[:, None, None] * length
    if mask is None:
        counts, places, order, allowed = torch.full_like(slots, length)[None], slots[None], None, None
    else:
        totals = mask.sum(-1, keepdim=True)
        counts, places, order = totals.expand(batch, length), real_places(mask), real_first(mask)
        allowed = torch.arange(number, device=device) < budgets(totals, factor)[..., None]  # [B, 1, U]
    sample = sampled_keys(places, number, counts, seed)
    if order is not None:
        sample = order[:, None].expand(-1, length, -1).gather(2, sample)

    def standing_out(scores: Tensor, part: slice) -> Tensor:
        """[B, t, U, H] -> [B, t, H]"""
        if allowed is None:
            best, total = scores.amax(2), scores.sum(2)
        else:
            absent = ~allowed[..., None]
            best, total = scores.masked_fill(absent, -torch.inf).amax(2), scores.masked_fill(absent, 0.0).sum(2)
        return best - total / counts[:, part, None].clamp(min=1)

    if isinstance(length, torch.SymInt):
        scores = wide_products(query, key).gather(3, sample[:, None].expand(-1, heads, -1, -1))
        result = standing_out(scores.permute(0, 2, 3, 1), slice(None)).transpose(1, 2)
        return result if mask is None else result.masked_fill(~mask[:, None], -torch.inf)
    sample = (sample + first).expand(batch, length, number)
    asked = query.transpose(1, 2)
    share = _NUMBERS_AT_ONCE.get(device.type, _NUMBERS_AT_ONCE_ELSEWHERE)
    step = max(share // max(batch * number * heads * width, 1), 1)
    found = []
    for start in range(0, length, step):
        part = slice(start, start + step)
        keys, queries = widened(rows[sample[:, part]], asked[:, part])  # [B, t, U, H, d], [B, t, H, d]
        scores = (keys * queries[:, :, None]).sum(-1)  # [B, t, U, H]
        found.append(standing_out(scores, part))
    result = torch.cat(found, dim=1).transpose(1, 2) if found else query.new_zeros(batch, heads, 0)
    return result if mask is None else result.masked_fill(~mask[:, None], -torch.inf)


@torch.no_grad()
def active_queries(measure: Tensor, mask: Tensor | None, factor: int) -> ActiveQueries:
    """The u = [`budget`] queries of each row and head whose measure [B, H, T] is largest; of equals the earlier."""
    number = _room(measure.shape[2], factor)
    places = measure.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    if mask is None:
        return ActiveQueries(places, None)
    used = torch.arange(number, device=places.device) < budgets(mask.sum(-1, keepdim=True), factor)
    return ActiveQueries(places, used[:, None])


def mean_of_real(value: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, T, d] -> [B, H, 1, d]: the mean over real tokens, summed in float32 at least; 0 where there are none."""
    wide = value.to(accumulation_dtype(value.dtype))
    if mask is None:
        return wide.mean(2, keepdim=True).to(value.dtype)
    wide = wide.masked_fill(~mask[:, None, :, None], 0.0)
    return (wide.sum(2, keepdim=True) / mask.sum(-1).clamp(min=1)[:, None, None, None]).to(value.dtype)


def mean_so_far(value: Tensor, mask: Tensor | None, total: bool = False) -> Tensor:
    """[B, H, T, d] -> the mean of the real tokens up to each, in float32 at least on the way; their sum if
    `total`."""
    wide = value.to(accumulation_dtype(value.dtype))
    if mask is not None:
        wide = wide.masked_fill(~mask[:, None, :, None], 0.0)
    sums = wide.cumsum(2)
    if not total:
        counted = torch.arange(1, value.shape[2] + 1, device=value.device)[None]
        counted = counted if mask is None else real_places(mask) + 1
        sums = sums / counted[:, None, :, None]
    return sums.to(value.dtype)
