# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of each query over a few blocks of consecutive keys, which every query chooses for itself.

Blocks are counted in the order of a row's real tokens, so that padding moves none. Queries that have chosen the same
block are laid together in tiles; each rank of choices is a round of tiles, and rounds are joined as one softmax. On
CUDA FlexAttention passes over the keys that no query of a block has chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .block_sparse.flex import flex_applies, flex_chosen_blocks
from .common.real_tokens import real_first, real_places
from .common.row_lookup import take_rows
from .score_terms.terms import Pairs, ScoreTerms, Tiles
from .score_terms.tiles import tile_attention

# So few queries are a tile each, with all the keys that they have chosen: groups of them would be nearly empty.
FEW_QUERIES = 16
TILE_ROWS = 64


class Places(NamedTuple):
    """Where tokens stand among the real tokens of their row.

    query [B or 1, T], key [B or 1, S]: places; real [B or 1, S]: whether a key is a token. order [B, S]: the slots of
    keys, real ones first; None: as they stand.
    """

    query: Tensor
    key: Tensor
    real: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, query_index: Tensor, key_index: Tensor, padding_mask: Tensor | None) -> Places:
        """Of queries and keys in the slots `query_index` [T] and `key_index` [S]; padding_mask [B, S], True = real."""
        if padding_mask is None:
            return cls(query_index[None], key_index[None], torch.ones_like(key_index, dtype=torch.bool)[None], None)
        key = real_places(padding_mask)
        return cls(key[:, query_index], key, padding_mask, real_first(padding_mask))

    def in_order(self, x: Tensor) -> Tensor:
        """Keys or values [B, K, S, d] with zeros behind the real tokens, which come first."""
        if self.order is None:
            return x
        x = x.masked_fill(~self.real[:, None, :, None], 0.0)
        return x.gather(2, self.order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    @property
    def tokens(self) -> Tensor:
        """[B or 1]: how many are real."""
        return self.real.sum(-1)


def best_blocks(scores: Tensor, open_: Tensor, count: int) -> Tensor:
    """The `count` best blocks of each query, by scores [B, H, T, N], among those that are `open_` [B or 1, 1, T, N];
    -1 where there are fewer. [B, H, T, min(count, N)]"""
    scores = scores.masked_fill(~open_, -torch.inf)
    best, chosen = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return chosen.masked_fill(best == -torch.inf, -1)


def chosen_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choices: Tensor,
    places: Places,
    block: int,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """softmax over the keys of the chosen blocks, those no later than the query if `causal`, times the values.

    query [B, H, T, d]; key and value [B, K, S, d], K dividing H, as [`Places.in_order`] has them; choices
    [B, H, T, n]: numbers of blocks, each once in a list, -1: none -> [B, H, T, d], zeros of a query that sees nothing.
    Time O(T n block d), memory as much in booleans. No gradient goes through the choice.
    """
    limit, groups = _limit(places, choices, causal), query.shape[1] // key.shape[1]
    few = query.shape[2] <= FEW_QUERIES
    if few:
        tiles, key, value = _read_by_few(choices, limit, block, key, value, groups)
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if not few and dropout == 0 and flex_applies(query, key, value):
        found = flex_chosen_blocks(query, key, value, choices, limit, block, scale)
        if found is not None:
            return found
    rounds = [[tiles]] if few else [[_tiles(each, limit, block, key.shape[2])] for each in choices.unbind(-1)]
    terms = _NoTerms(1.0, (), query.shape[2], key.shape[2])
    return tile_attention(query * scale, key, value, (), terms, rounds, dropout)


def chosen_block_mask(choices: Tensor, places: Places, block: int, causal: bool) -> Tensor:
    """The same pairs as a mask over keys in their slots, [B, H, T, S] boolean."""
    of_key = (places.key // block)[:, None, None]
    mask = torch.zeros(*choices.shape[:3], of_key.shape[-1], dtype=torch.bool, device=choices.device)
    for each in choices.unbind(-1):
        mask = mask | (each[..., None] == of_key)
    if causal:
        mask = mask & (places.key[:, None, None] <= places.query[:, None, :, None])
    return mask & places.real[:, None, None]


class _NoTerms(ScoreTerms):
    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        return pairs.query.new_zeros(1, 1, 1, 1, 1)


def _limit(places: Places, choices: Tensor, causal: bool) -> Tensor:
    """[B, T]: how many keys, in the order of tokens, a query may see."""
    count = places.tokens[:, None]
    seen = torch.minimum(places.query + 1, count) if causal else count.expand_as(places.query)
    return seen.expand(choices.shape[0], -1)


def _read_by_few(
    choices: Tensor, limit: Tensor, block: int, key: Tensor, value: Tensor, groups: int
) -> tuple[Tiles, Tensor, Tensor]:
    """A tile for each query, and the keys and values that they index: of heads that share some, what each reads."""
    slots = torch.arange(block, device=choices.device)
    at = (choices[..., None] * block + slots).flatten(3)  # [B, H, T, n * block]
    allowed = ((at >= 0) & (at < limit[:, None, :, None]))[:, :, :, None]
    queries = torch.arange(choices.shape[2], device=choices.device)[None, None, :, None]
    if groups == 1:
        return Tiles(queries, at, allowed), key, value
    rows = at.clamp(0, key.shape[2] - 1).unflatten(1, (-1, groups)).flatten(2)
    key, value = (take_rows(x, rows).unflatten(2, (groups, -1)).flatten(1, 2) for x in (key, value))
    at = torch.arange(key.shape[2], device=at.device).view(1, 1, *at.shape[2:]).expand(at.shape)
    return Tiles(queries, at, allowed), key, value


def _tiles(choice: Tensor, limit: Tensor, block: int, keys: int) -> Tiles:
    """Tiles of one rank of choices [B, H, T]: each has up to `TILE_ROWS` queries that have chosen one block."""
    batch, heads, length = choice.shape
    blocks, rows = -(-keys // block), min(TILE_ROWS, block, length)
    number = -(-length // rows) + blocks  # every block may have a tile that is not full
    group = torch.where(choice < 0, blocks, choice)  # those without a block come last, and into no tile
    order = group.argsort(dim=-1, stable=True)
    group = group.gather(-1, order)
    counts = torch.zeros(batch, heads, blocks + 1, dtype=torch.long, device=choice.device)
    counts = counts.scatter_add(-1, group, torch.ones_like(group))
    tiles = -(-counts // rows)
    first_row, first_tile = counts.cumsum(-1) - counts, tiles.cumsum(-1) - tiles
    within = torch.arange(length, device=choice.device) - first_row.gather(-1, group)
    at = (first_tile.gather(-1, group) + within // rows) * rows + within % rows
    none = number * rows  # one more place, which is cut off
    at = torch.where(group == blocks, none, at)
    filled = torch.full((batch, heads, none + 1), -1, dtype=torch.long, device=choice.device)
    query_at = filled.scatter(-1, at, order)[..., :-1].unflatten(-1, (number, rows))
    own_block = filled.scatter(-1, at, group)[..., :-1].unflatten(-1, (number, rows)).amax(-1)
    key_at = own_block[..., None] * block + torch.arange(block, device=choice.device)  # below 0 where a tile is empty
    sees = limit[:, None].expand(-1, heads, -1)
    sees = take_rows(sees[..., None], query_at.clamp(min=0))[..., 0].masked_fill(query_at < 0, 0)
    allowed = (key_at[..., None, :] >= 0) & (key_at[..., None, :] < sees[..., None])
    return Tiles(query_at, key_at, allowed)
