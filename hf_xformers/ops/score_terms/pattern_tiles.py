# SPDX-License-Identifier: Apache-2.0
"""The pairs of a pattern of positions as tiles for [`tile_attention`], from the plan of the block-sparse engine."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..block_sparse.attention import bound_rows, make_pieces
from ..block_sparse.patterns import Pattern
from ..common.padding import row_spans
from .terms import Tiles

Rounds = list[list[Tiles]]


@torch.compiler.disable  # plans are made outside of graphs
def pattern_tiles(
    pattern: Pattern,
    heads: int,
    queries: int,
    keys: int,
    *,
    query_offset: int = 0,
    key_offset: int = 0,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    segment_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> list[tuple[slice, Rounds]]:
    """Ranges of heads with equal pattern, and their rounds of tiles.

    The arguments are those of [`block_sparse_attention`]; hidden_keys [B, S]: real tokens that are not read all the
    same. Where the pattern depends on more than distances, positions are counted from a row's first real token: tiles
    then name the places that these positions have in each row.
    """
    lead, row_lengths = torch.zeros(1, dtype=torch.long, device=device), None
    if key_padding_mask is not None and pattern.period != 1:
        lead, row_lengths = row_spans(key_padding_mask)
        row_lengths = key_offset + row_lengths if pattern.needs_length else None
    # Rows whose text begins later have their first queries at earlier positions.
    start = query_offset
    if key_padding_mask is not None and pattern.period != 1 and start > 0:
        start = max(start - int(lead.max()), 0)
    end = query_offset + queries
    readable = key_padding_mask
    if hidden_keys is not None:
        readable = ~hidden_keys if readable is None else readable & ~hidden_keys
    found: dict[tuple[int, int], Rounds] = {}
    lengths, offsets = (end - start, keys, 0), (start, key_offset)
    runs = bound_rows(pattern, row_lengths, lead.shape[0])
    pieces = ((rows, make_pieces(bound, causal, (heads, heads), lengths, offsets)) for rows, bound in runs)
    for rows, piece in ((rows, piece) for rows, some in pieces for piece in some):
        rounds = found.setdefault((piece.heads.start, piece.heads.stop), [])
        absent = None
        if len(runs) > 1:  # these tiles are those of some rows of the batch
            number = torch.arange(lead.shape[0], device=device)
            absent = ((number < rows.start) | (number >= rows.stop))[:, None, None]
        for part in piece.parts:
            tiles = []
            for each in part.tiles:
                q_at, k_at = (part.positions(each, which, each=True).to(device) for which in "qk")
                tile_count = max(q_at.shape[0], k_at.shape[0])
                allowed = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
                if not each.full:
                    allowed = each.pattern.allows(q_at[:, :, None], k_at[:, None])
                if each.k_valid is not None:
                    allowed = allowed & each.k_valid[:, None].to(device)
                allowed = allowed.expand(tile_count, each.rows, each.width)[None]
                # From positions to places in each row of the batch.
                q_at = q_at.expand(tile_count, -1) + (piece.shift - query_offset) + lead[:, None, None]
                k_at = k_at.expand(tile_count, -1) + (piece.shift - key_offset) + lead[:, None, None]
                inside = (k_at >= 0) & (k_at < keys)
                k_at = k_at.clamp(0, keys - 1)
                q_at = torch.where((q_at >= 0) & (q_at < queries), q_at, -1)
                q_at = q_at if absent is None else q_at.masked_fill(absent, -1)
                if readable is not None:
                    inside = inside & _at(readable, k_at)
                if segment_ids is not None:
                    own = _at(segment_ids, q_at.clamp(min=0) + query_offset - key_offset)
                    allowed = allowed & (own[..., :, None] == _at(segment_ids, k_at)[..., None, :])
                allowed = allowed & inside[..., None, :]
                tiles.append(Tiles(q_at[:, None], k_at[:, None], allowed[:, None]))
            rounds.append(tiles)
    # Rows of other lengths may have other heads alike: ranges that overlap are cut at each other's ends.
    edges = sorted({edge for heads in found for edge in heads})
    return [
        (slice(*part), [each for heads, rounds in found.items() if _holds(heads, part) for each in rounds])
        for part in pairwise(edges)
    ]


def _holds(heads: tuple[int, int], part: tuple[int, int]) -> bool:
    return heads[0] <= part[0] and part[1] <= heads[1]


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S], index [B or 1, n, t] -> [B, n, t]"""
    flat = index.flatten(1).expand(x.shape[0], -1)
    return x.gather(1, flat).unflatten(1, index.shape[1:])
