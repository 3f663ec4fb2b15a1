# SPDX-License-Identifier: Apache-2.0
"""Learned vectors of distances and of token types, which all layers of a tower read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.call import Call
from ...core.prepared import Prepared
from ...core.reading_weights import weight_of
from ...ops.common.real_tokens import first_real


class DistanceTable(Prepared):
    """Vectors of distances [n, D] without parameters, in a slot for each way they are made."""

    rows: Tensor


class KeyTypes(Prepared):
    """The types of keys, [B or 1, S]."""

    types: Tensor


class RelativeEmbeddings(nn.Module):
    """Tables of distances [2 P + M, D] and of types [n, D], each normalized by itself (Ding et al. 2021, arXiv
    2012.15688, released code: word, position and type vectors have a layer norm each).

    P: `max_position_embeddings`; M: slots of the stack's memory. Distances from -P to P + M - 1 have vectors, and
    farther ones share that of the farthest.
    """

    def __init__(self, config, distances: bool, types: int):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.first = config.max_position_embeddings
        rows = 2 * self.first + (config.stack.memory_slots(config) or 0)
        self.distances = nn.Embedding(rows, width) if distances else None
        self.distance_norm = nn.LayerNorm(width, eps=eps) if distances else None
        self.types = nn.Embedding(types, width) if types else None
        self.type_norm = nn.LayerNorm(width, eps=eps) if types else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def of_distances(self, distance: Tensor) -> Tensor | None:
        """distance [n] (slots, positive for earlier keys) -> [n, D]; None without such a table."""
        if self.distances is None or self.distance_norm is None:
            return None
        rows = (distance + self.first).clamp(0, self.distances.weight.shape[0] - 1)
        return self.dropout(self.distance_norm(self.distances(rows)))

    def of_types(self) -> Tensor | None:
        """[n, D]; None without such a table."""
        if self.types is None or self.type_norm is None:
            return None
        return self.dropout(self.type_norm(weight_of(self.types)))


def key_types(given: Tensor | None, context: Call, slots: int, order: Tensor | None) -> Tensor:
    """The types [B or 1, slots + T] of keys: those `given` [B, T] (None: all 0) to the segment's tokens, and before
    them, for a memory of `slots` states, the type of the row's first real token. order: in which keys stand."""
    length = context.query_index.shape[0]
    types = torch.zeros(1, length, dtype=torch.long, device=context.query_index.device) if given is None else given
    if slots:
        real = context.query_padding_mask
        first = types[:, :1]
        if real is not None and types.shape[0] == real.shape[0]:
            first = types.gather(1, first_real(real)[:, None])
        types = torch.cat([first.expand(-1, slots), types], dim=1)
    return types if order is None else types.expand(order.shape[0], -1).gather(1, order)
