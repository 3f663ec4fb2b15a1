# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of one call stand among all that it may read, and which of these are real."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from ..ops.common.real_tokens import real_places


def can_inspect() -> bool:
    """Whether values may steer the program: not while a graph of it is being recorded."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


class Extent(NamedTuple):
    """The tokens of a call and what is cached before them.

    Attributes:
        batch, length: B and T of the current tokens.
        cached: how many tokens stand before them; a tensor where the cache counts on the device.
        total: S, the slots of keys: cached + current tokens, or the capacity of a static cache.
        static: the cache has slots that are not written yet.
        device: where the tokens are.
    """

    batch: int
    length: int
    cached: int | Tensor
    total: int
    static: bool
    device: torch.device

    @property
    def fresh(self) -> bool:
        """Nothing is cached: the keys are exactly the current tokens."""
        return isinstance(self.cached, int) and self.cached == 0 and not self.static

    def query_index(self) -> Tensor:
        """[T]: slots of the current tokens."""
        if isinstance(self.cached, Tensor):
            return torch.arange(self.length, device=self.device) + self.cached
        return torch.arange(self.cached, self.cached + self.length, device=self.device)

    def key_index(self) -> Tensor:
        """[S]: slots of the keys."""
        return torch.arange(self.total, device=self.device)

    def exceeds(self, longest: int | None) -> bool:
        """Whether the slots reach beyond `longest` (None: there is no limit); those of a cache that counts on the
        device may, where it has so many."""
        if longest is None:
            return False
        if isinstance(self.cached, int):
            return self.cached + self.length > longest
        return isinstance(self.total, int) and can_inspect() and self.total > longest


def extent_of(inputs_embeds: Tensor, cache: Cache | None) -> Extent:
    """inputs_embeds: [B, T, D]. cache: of self-attention. Raises ValueError for a text without tokens."""
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The text has no tokens (a batch of {batch} rows of length 0); give at least one, such as the token that"
            " begins a text."
        )
    cached = cache.get_seq_length() if cache is not None else 0
    static = cache is not None and bool(cache.is_compileable)
    total = cache.get_mask_sizes(length, 0)[0] if cache is not None and static else cached + length
    return Extent(batch, length, cached, total, static, inputs_embeds.device)


def read_masks(
    attention_mask: Tensor | None, extent: Extent, takes_pairs: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What a caller's `attention_mask` says: (padding mask [B, S], True = real token; prepared mask [B, 1, T, S] of
    pairs), each None where there is none. takes_pairs: every layer accepts a prepared mask. Of a prepared one for a
    static cache both are made: what counts real tokens (positions, hashes of pairs) needs the former.

    Raises:
        ValueError: a mask that does not fit the call, or a prepared one that not every layer accepts.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.ndim == 4:
        if not extent.static:
            if takes_pairs:
                return None, attention_mask
            raise ValueError(
                "A prepared 4-D attention mask needs attention with explicit scores (e.g. 'dense'); give a "
                "[batch, length] mask of real tokens instead."
            )
        # `generate` makes one of the padding for every static cache: its last query sees all real tokens.
        last = attention_mask[:, 0, -1]
        padding = _padding_mask(last if last.dtype == torch.bool else last == 0, extent)
        return padding, attention_mask if takes_pairs else None
    return _padding_mask(attention_mask, extent), None


def _padding_mask(attention_mask: Tensor, extent: Extent) -> Tensor | None:
    batch, length, cached, total, static, device = extent
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch:
        raise ValueError(
            f"`attention_mask` must be [batch, length] = [{batch}, {total}], got {list(attention_mask.shape)}."
        )
    padding = attention_mask.to(device=device, dtype=torch.bool)
    if padding.shape[1] == length and not static and cached:
        # A mask of the new tokens alone: what is cached was real.
        padding = torch.cat([padding.new_ones(batch, int(cached)), padding], dim=1)
    elif static and padding.shape[1] < total:
        padding = pad(padding, (0, total - padding.shape[1]))
    if padding.shape[1] != total:
        raise ValueError(
            f"`attention_mask` covers {attention_mask.shape[1]} tokens, but {cached} cached and {length} new "
            f"tokens make {total}."
        )
    if not static and can_inspect() and bool(padding.all()):
        return None  # nothing is padded: the kernels' fast paths take no mask
    return padding


def token_positions(position_ids: Tensor | None, padding: Tensor | None, current: Tensor) -> Tensor:
    """[B or 1, T] positions of the current tokens: the caller's `position_ids` ([B, T] or [T]), else real tokens
    counted from 0, on whichever side padding [B, S] is. current: [T] slots of these tokens."""
    if position_ids is not None:
        return position_ids if position_ids.ndim == 2 else position_ids[None]
    if padding is not None:
        return real_places(padding)[:, current]
    return current[None]
