# SPDX-License-Identifier: Apache-2.0
"""Attention over a binary partitioning of a text: leaves are its tokens, nodes of level e cover 2^e of them.

Node u of level e covers the leaves u 2^e .. (u + 1) 2^e - 1, as far as there are so many. Leaves and nodes of higher
levels, the spans, stand in two lists. Spans of an encoder are listed level by level up to the root. In a decoder a
span exists once its last leaf has come, and spans are listed in the order in which that happens: a text that grows
adds to the end of the list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.constants import constant
from .common.head_groups import over_head_groups
from .common.kept import kept
from .common.products import masked_softmax, wide_products

BLOCK = 64  # leaves whose keys are gathered together
LEAF = 0  # label of a leaf for itself


def level_sizes(leaves: int, causal: bool) -> list[int]:
    """Nodes of each level, leaves first: half as many, rounded up until there is one, or down while there is one."""
    sizes = [leaves]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2 if causal else -(-sizes[-1] // 2))
    return sizes


def finished_spans(leaves: Any) -> Any:
    """How many spans are complete after so many leaves, an int or a tensor: sum_e floor(leaves / 2^e), e >= 1, which
    is their number less the ones among its binary digits."""
    if isinstance(leaves, int):
        return leaves - leaves.bit_count()
    ones = leaves - ((leaves >> 1) & 0x55555555)
    ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
    ones = (ones + (ones >> 4)) & 0x0F0F0F0F
    return leaves - (((ones * 0x01010101) >> 24) & 0xFF)


def span_index(level: Tensor, node: Tensor, leaves: int, causal: bool) -> Tensor:
    """The places of spans (levels >= 1) in their list."""
    if causal:  # after those that an earlier leaf has completed, and the smaller ones that the same leaf has
        last = ((node + 1) << level) - 1
        return finished_spans(last) + level - 1
    begins = [0, 0]  # of level 0, which is not in the list, and of level 1
    for size in level_sizes(leaves, False)[1:]:
        begins.append(begins[-1] + size)
    return constant(begins, level.device)[level] + node


@kept(32)
def listed_spans(leaves: int, causal: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Level and number of every span in the order of their list, and the places in the list of spans taken level by
    level."""
    sizes = level_sizes(leaves, causal)
    levels = torch.cat(
        [torch.full((size,), level) for level, size in enumerate(sizes[1:], 1)] or [torch.empty(0).long()]
    )
    nodes = torch.cat([torch.arange(size) for size in sizes[1:]] or [torch.empty(0).long()])
    place = span_index(levels, nodes, leaves, causal)
    order = place.argsort()
    return levels[order].to(device), nodes[order].to(device), place.to(device)


def picks(leaf: Tensor, leaves: int, count: int, clip: int, causal: bool) -> tuple[Tensor, Tensor]:
    """What leaves [...] read, [..., picks] each, and the labels of that: n < `leaves` is leaf n, `leaves` + n is span
    n of the list, and -1 an empty slot.

    A leaf walks outward from itself: on each side `count` nodes of level 0, then `count` of level 1, and so on. Where
    the next node would begin inside the other half of a node, its first pick of a level is the child of the level
    below. What is picked on one side covers that side without overlap. Labels: 0 for the leaf itself, which stands
    first, and (2 count + 1) min(e, clip) + 2 c - 1 for the c-th pick of level e on the left, + 2 c on the right.
    """
    turn = torch.arange(count, device=leaf.device)
    levels, nodes, found, labels = [torch.zeros_like(leaf)[..., None]], [leaf[..., None]], [], []
    for side in (0,) if causal else (0, 1):
        edge = leaf + side  # left: leaves before it are left to cover; right: those from it on
        for level in range(len(level_sizes(leaves, False))):
            width = 2**level
            half = (edge % width != 0).long()
            own = level - half[..., None] * (turn == 0)
            taken = (turn * width)[None] - (half * (width // 2))[..., None] * (turn > 0)
            edges = edge[..., None] + (taken if side else -taken)
            levels.append(own)
            nodes.append((edges >> own) - (1 - side))
            found.append((edges < leaves) if side else (edges > 0))
            labels.append(((2 * count + 1) * min(level, clip) + 2 * turn + 1 + side).expand_as(edges))
            last = count * width - half * (width // 2)
            edge = edge + (last if side else -last)
    some = torch.cat([torch.ones_like(leaf, dtype=torch.bool)[..., None], *found], -1)
    label = torch.cat([torch.full_like(leaf, LEAF)[..., None], *labels], -1)
    depth, node = torch.cat(levels, -1), torch.cat(nodes, -1)
    listed = leaves + span_index(depth.clamp(min=1), node.clamp(min=0), leaves, causal)
    return torch.where(some, torch.where(depth == 0, node, listed), -1), torch.where(some, label, -1)


@kept(16)
def leaf_tiles(
    leaves: int, count: int, clip: int, causal: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of leaves: the nodes [blocks, width] that some leaf of a block reads, and, [blocks, BLOCK, width] each,
    which of them each leaf reads, and the labels of those, 0 of the others."""
    blocks = -(-leaves // BLOCK)
    nodes, labels = picks(torch.arange(blocks * BLOCK).clamp(max=leaves - 1), leaves, count, clip, causal)
    some = ((nodes >= 0).any(0)).nonzero()[:, 0]
    nodes, labels = nodes[:, some], labels[:, some]
    flat = nodes.view(blocks, -1)
    ordered, order = flat.sort(1)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    new &= ordered >= 0
    rank = new.long().cumsum(1) - 1  # of empty slots -1
    width = int(rank.max()) + 1
    table = torch.zeros(blocks, width + 1, dtype=torch.long)
    table.scatter_(1, torch.where(new, rank, width), ordered.clamp(min=0))
    place = torch.empty_like(rank).scatter_(1, order, torch.where(ordered >= 0, rank, width))
    found = torch.full((blocks, BLOCK, width + 1), -1)
    found.scatter_(2, place.view(blocks, BLOCK, -1), labels.view(blocks, BLOCK, -1))
    labels = found[:, :, :width]
    return table[:, :width].to(device), (labels >= 0).to(device), labels.clamp(min=0).to(device)


def weigh(
    scores: Tensor, allowed: Tensor, value: Tensor, scale: float, dropout: float, terms: Tensor | None = None
) -> Tensor:
    """softmax(scale (scores + terms)) over the allowed pairs, times the values; zeros where there are none."""
    scores = (scores if terms is None else scores + terms) * scale
    weights = masked_softmax(scores, allowed).to(value.dtype)
    return (F.dropout(weights, dropout) if dropout else weights) @ value


def leaves_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    relative: Tensor | None,
    *,
    count: int,
    clip: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """All leaves over the nodes that they read: query [B, H, T, d], key and value [B, H, T + spans, d], `real` [B, T +
    spans] nodes with a real token (None: all that is read), `relative` [labels, d] the vectors a of q_i (k_j + a_ij),
    or None -> [B, H, T, d].

    A block of leaves shares the nodes that it gathers: T (2 BLOCK + 2 count log T) / BLOCK keys in all, which are
    gathered again in the backward pass, for some heads at a time.
    """
    leaves = query.shape[2]
    nodes, read, labels = leaf_tiles(leaves, count, clip, causal, query.device)
    blocks, flat, allowed = nodes.shape[0], nodes.flatten(), read[None]
    if real is not None:
        allowed = allowed & real[:, nodes][:, :, None]

    def some_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = F.pad(query, (0, 0, 0, blocks * BLOCK - leaves)).unflatten(2, (blocks, BLOCK))
        k, v = (x.index_select(2, flat).unflatten(2, nodes.shape) for x in (key, value))
        terms = None
        if relative is not None:
            terms = wide_products(q, relative)
            terms = terms.gather(-1, labels.expand(*terms.shape[:2], -1, -1, -1))
        return weigh(wide_products(q, k), allowed[:, None], v, scale, dropout, terms).flatten(2, 3)[:, :, :leaves]

    # A leaf's scores are as many as four of its vectors have numbers.
    return over_head_groups(some_heads, query, key, value, random=dropout > 0, groups=8)


def few_leaves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    relative: Tensor | None,
    read: tuple[Tensor, Tensor],
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The same for some leaves, each of which gathers what it reads: query [B, H, t, d], read: the nodes [B or 1, t,
    picks] and the labels -> [B, H, t, d]."""
    nodes, labels = (x.expand(query.shape[0], -1, -1) for x in read)
    allowed = (labels >= 0)[:, None, :, None]
    at = nodes.clamp(min=0)
    if real is not None:
        allowed = allowed & real.gather(1, at.flatten(1)).view_as(at)[:, None, :, None]
    index = at.flatten(1)[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
    k, v = (x.gather(2, index).unflatten(2, at.shape[1:]) for x in (key, value))
    terms = None
    if relative is not None:
        table = wide_products(query, relative)
        terms = table.gather(-1, labels.clamp(min=0)[:, None].expand(-1, table.shape[1], -1, -1))[..., None, :]
    return weigh(wide_products(query[..., None, :], k), allowed, v, scale, dropout, terms)[..., 0, :]


def spans_by_level(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, causal: bool, scale: float, dropout: float = 0.0
) -> Tensor:
    """All spans over their own leaves: query [B, H, spans, d] in the order of their list, key and value [B, H, T, d],
    `real` [B, T] -> [B, H, spans, d]. All of a span's leaves have one label, which its softmax does not see."""
    leaves = key.shape[2]
    sizes = level_sizes(leaves, causal)[1:]
    if not sizes:
        return query
    place = listed_spans(leaves, causal, query.device)[2]
    known = key.new_ones(1, leaves, dtype=torch.bool) if real is None else real

    def some_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_level = query.index_select(2, place) if causal else query
        key, value = key.contiguous(), value.contiguous()
        found = []
        for level, each in enumerate(by_level.split(sizes, dim=2), 1):
            size, width = each.shape[2], 2**level
            k, v = (_fitted(x, size * width, 2).unflatten(2, (size, width)) for x in (key, value))
            seen = _fitted(known[..., None], size * width, 1)[..., 0].unflatten(1, (size, width))
            found.append(
                weigh(wide_products(each[..., None, :], k), seen[:, None, :, None], v, scale, dropout)[..., 0, :]
            )
        joined = torch.cat(found, 2)
        return joined.index_select(2, place.argsort()) if causal else joined

    return over_head_groups(some_heads, query, key, value, random=dropout > 0)


def _fitted(x: Tensor, length: int, dim: int) -> Tensor:
    """x with `length` entries along its last dimension but one, `dim`: zeros added, or the last ones cut off."""
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x.narrow(dim, 0, length)


def covered(level: Tensor, node: Tensor, leaves: Tensor) -> Tensor:
    """Whether spans [...] cover leaves [n], [..., n]."""
    first = (node << level)[..., None]
    return (leaves >= first) & (leaves < first + (torch.ones_like(level) << level)[..., None])
