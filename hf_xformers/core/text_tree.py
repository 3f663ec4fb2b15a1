# SPDX-License-Identifier: Apache-2.0
"""The spans of a text that is cut in halves, and these again: which a call has, and where they stand."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.binary_partition import finished_spans, listed_spans
from ..ops.common.real_tokens import real_first, real_places
from .call import Call, can_inspect
from .prepared import Prepared, State


class Spans(State):
    """The states of spans, [B, N, D]."""

    states: Tensor


class SpansBeside(Prepared):
    """The call as functions of single nodes see it where spans go through layers besides tokens, as further tokens."""

    call: Call


class Tree(Prepared):
    """Where the nodes of a call's texts are.

    place: [B or 1, T] how many real tokens stand before each query; order: [B, S] the slots of tokens, real ones
    first, or None (as they stand); real: [B, S] in that order, or None (all). Of this call's spans level and number
    [B or 1, N] of each, `valid` whether it covers a real token, in a decoder whether it is complete ([B or 1, N], or
    None: all), `start` [B or 1, 1] the place of the first in the list, and `total` the length of that list.
    """

    place: Tensor
    order: Tensor | None
    real: Tensor | None
    level: Tensor
    node: Tensor
    valid: Tensor | None
    start: Tensor
    total: int

    @property
    def count(self) -> int:
        return self.level.shape[1]

    def with_spans(self, mask: Tensor | None, batch: int) -> Tensor | None:
        """[B, T] of tokens -> [B, T + N]: with this call's spans behind them."""
        if mask is None:
            return None
        valid = mask.new_ones(1, self.count) if self.valid is None else self.valid
        return torch.cat([mask, valid.expand(batch, -1)], dim=1)


def make_tree(context: Call) -> Tree:
    """The tree of a call, made once for all layers."""
    return context.prepare(Tree, lambda: _tree(context))


def _tree(context: Call) -> Tree:
    mask, queries = context.padding_mask, context.query_index
    slots = int(context.key_index.shape[0])  # a graph is for this length
    levels, nodes, _ = listed_spans(slots, context.causal, queries.device)
    if mask is None:
        before = 0 if context.fresh else slots - queries.shape[0]
        begin, end = finished_spans(before), finished_spans(slots)
        if not context.causal:
            begin, end = 0, levels.shape[0]
        start = queries.new_full((1, 1), begin)
        tree = Tree(
            queries[None], None, None, levels[None, begin:end], nodes[None, begin:end], None, start, levels.shape[0]
        )
    else:
        order, real = real_first(mask), mask.sum(-1, keepdim=True)
        level, node, place = levels[None], nodes[None], real_places(mask)[:, queries]
        start = real.new_zeros(1, 1)
        if context.causal:
            done = finished_spans(real)
            if not context.fresh:
                start = finished_spans(real - mask[:, queries].sum(-1, keepdim=True))
                new = sum(-(-queries.shape[0] // 2**e) for e in range(1, slots.bit_length()))
                if can_inspect():
                    new = int((done - start).max())
                index = start + torch.arange(min(new, levels.shape[0]), device=mask.device)
                inside = index.clamp(max=max(levels.shape[0] - 1, 0))
                level, node = levels[inside], nodes[inside]
            else:
                index = torch.arange(levels.shape[0], device=mask.device)[None]
            valid = index < done
        else:
            valid = (node << level) < real
        sorted_mask = torch.arange(slots, device=mask.device) < real
        tree = Tree(place, order, sorted_mask, level, node, valid, start, levels.shape[0])
    return tree
