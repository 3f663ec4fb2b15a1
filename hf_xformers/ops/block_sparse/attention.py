# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over a position-based pattern, at the cost of the pattern and not of T x T.

[`block_sparse_attention`] is the fast engine, [`block_sparse_reference`] the literal dense equation with the same
arguments, which also returns the attention weights. The pattern algebra is in
[`hf_xformers.ops.block_sparse.patterns`].
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.padding import may_look, row_spans
from ..common.products import wide_products
from ..common.real_tokens import real_first
from ..common.tile_engines import autocast_inputs
from .exported import Hidden, exported_attention
from .few_rows import FEW_QUERIES, few_rows
from .flex import Places, flex_applies, flex_block_sparse
from .op import bound_rows, forward_op, make_pieces, pieces_of_rows
from .pattern_base import Pattern, PerHead
from .patterns import FULL
from .patterns import causal as causal_pattern
from .reference import ScoreBias, block_sparse_reference, counts_positions

__all__ = ["block_sparse_attention", "block_sparse_reference", "bound_rows", "make_pieces"]


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    key_padding_mask: Tensor | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    bias_is_relative: bool = False,
    segment_ids: Tensor | None = None,
    global_mask: Tensor | None = None,
    global_query: Tensor | None = None,
    global_key: Tensor | None = None,
    global_value: Tensor | None = None,
    max_globals: int | None = None,
    side_key: Tensor | None = None,
    side_value: Tensor | None = None,
    side_mask: Tensor | None = None,
    return_lse: bool = False,
    score_cap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax` over the keys that `pattern` allows, times the values.

    Query `i` stands at position `query_offset + i`, key `j` at `key_offset + j`. Any lengths work. A query that may
    read no key gives zeros, also in all gradients. With padding, positions are counted from each row's first real
    token where the pattern depends on more than distances, and up to its last one where it depends on the length, so
    that padding on either side changes no result. Time and memory grow with the number of allowed pairs; neither T x T
    scores nor a T x T mask exist at any time.

    Args:
        query: [B, H, T_q, d].
        key, value: [B, K, T_k, d] and [B, K, T_k, d_v]; K divides H (grouped queries).
        pattern: one pattern, or one per head.
        key_padding_mask: [B, T_k], True for a real token.
        query_offset, key_offset: absolute positions of the first query and the first key, for decoding with a cache.
        causal: intersect the pattern with "no later position".
        scale: factor on the scores, by default `1 / sqrt(d)`.
        dropout: dropout on the attention weights.
        score_bias: called with positions [..., q] and [..., k] (the `block` method of a position component), returns
            what is added to the scaled scores, [..., H or 1, q, k]. Evaluated block by block; may carry gradients.
        bias_is_relative: the bias depends on `k - q` only. One evaluation then serves all blocks of equal shape;
            otherwise the values of all blocks are held at once.
        segment_ids: [B, T_k] document numbers of packed rows; tokens of different documents do not see one another.
        global_mask: [B, T_k], True for tokens that every query reads and that read every token themselves, whatever
            the pattern; numbers may differ by row. With `causal` they are only read, and only by later queries.
        global_query, global_key, global_value: separate projections for the rows of the global tokens (Longformer,
            Beltagy et al. 2020, section 3.1), shaped like query, key, value.
        max_globals: upper bound on the global tokens of a row; without it the mask is inspected, which breaks a
            compiled graph.
        side_key, side_value: [B, K, S, d], further keys that all queries read in the same softmax and that have no
            position (external global tokens, memories).
        side_mask: [B, S] or [B, T_q, S], True where a side key may be read.
        score_cap: c, where the scaled scores s become c tanh(s / c) before any bias.
        return_lse: also return the logarithm of the softmax denominator, [B, H, T_q], -inf for an empty row.

    Returns:
        [B, H, T_q, d_v].

    Raises:
        ValueError: shapes do not fit together, or options are combined that have no meaning together.
        TypeError: the pattern is not made of patterns.
    """
    masks = {"key_padding_mask": key_padding_mask, "segment_ids": segment_ids, "global_mask": global_mask}
    pattern = _checked(query, key, value, pattern, masks, (side_key, side_value, side_mask), dropout)
    if query_offset < 0 or key_offset < 0:
        raise ValueError(f"query_offset={query_offset}, key_offset={key_offset}: offsets start at 0.")
    if global_mask is None and any(x is not None for x in (global_query, global_key, global_value)):
        raise ValueError(
            "global_query, global_key and global_value are for the rows of global tokens; give global_mask as well."
        )
    query, key, value = autocast_inputs(query, key, value)
    side_key, side_value = (None if x is None else autocast_inputs(x)[0] for x in (side_key, side_value))
    call = _Call(
        query_offset=query_offset,
        key_offset=key_offset,
        causal=causal,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout=dropout,
        segment_ids=segment_ids,
        score_bias=score_bias,
        bias_is_relative=bias_is_relative,
        side=(side_key, side_value, side_mask),
        cap=0.0 if score_cap is None else float(score_cap),
        needs_lse=return_lse,
    )
    if global_mask is None:
        out, lse = _aligned(query, key, value, pattern, key_padding_mask, key_padding_mask, call)
        return out if lse is None or not return_lse else (out, lse)
    if side_key is not None or segment_ids is not None or return_lse or score_bias is not None:
        raise ValueError(
            "global_mask cannot be combined with side_key, segment_ids, score_bias or return_lse; "
            "use the pattern global_ for tokens at fixed positions."
        )
    rows = tuple(
        own if own is not None else shared
        for own, shared in ((global_query, query), (global_key, key), (global_value, value))
    )
    rows = autocast_inputs(*rows)
    return _with_globals(
        query, key, value, pattern, key_padding_mask, global_mask, (rows[0], rows[1], rows[2]), max_globals, call
    )


class _Call(NamedTuple):
    """The options that travel together through the layers of the engine; see [`block_sparse_attention`]."""

    query_offset: int
    key_offset: int
    causal: bool
    scale: float
    dropout: float
    segment_ids: Tensor | None = None
    row_lengths: Tensor | None = None  # [B], positions of each row's text, for patterns that depend on them
    score_bias: ScoreBias | None = None
    bias_is_relative: bool = False
    side: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    cap: float = 0.0  # on scores; 0: none
    needs_lse: bool = True  # else what is given out in its place may be None


def _engine(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, key_mask: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor | None]:
    if _takes_sdpa(query, key, pattern, key_mask, call):
        options = {"is_causal": call.causal, "enable_gqa": query.shape[1] != key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, None, call.dropout, scale=call.scale, **options), None
    if _takes_flex(query, key, value, call):
        side_key, side_value, side_mask = call.side
        has_side = side_key is not None and side_value is not None
        local = flex_block_sparse(
            query,
            key,
            value,
            pattern,
            Places(call.query_offset, call.key_offset, call.causal),
            call.scale,
            key_mask=key_mask,
            segment_ids=call.segment_ids,
            bias=call.score_bias,
            cap=call.cap,
            needs_lse=call.needs_lse or has_side,
        )
        if local is not None:
            out, lse = local
            if side_key is None or side_value is None or lse is None:
                return local
            return _join_side(out, lse, query, side_key, side_value, side_mask, call.scale)
    plain = call.dropout == 0 and call.score_bias is None and call.segment_ids is None and call.row_lengths is None
    if plain and query.shape[2] <= FEW_QUERIES and not torch.compiler.is_compiling():
        at = Places(call.query_offset, call.key_offset, call.causal)
        inputs = query, key, value, pattern, key_mask, at, call.scale
        found = few_rows(*inputs, cap=call.cap, needs_lse=call.needs_lse, side=call.side)
        if found is not None:
            return found
    # Other runtimes have no such operator. (Where dynamo records, it cannot make the pattern.)
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling() and call.dropout == 0:
        whole = pattern & causal_pattern() if call.causal else pattern
        others = call.segment_ids, call.row_lengths, call.side, call.score_bias, call.cap
        hidden, offsets = Hidden(key.shape[2], key_mask, *others), (call.query_offset, call.key_offset)
        made = exported_attention(query, key, value, whole, offsets, call.scale, hidden)
        if made is not None:
            return made
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    extras = [] if call.score_bias is None else _bias_blocks(query, key, pattern, call.score_bias, call)
    # The seed comes from the global generator, as for any dropout, and is replayed by gradient checkpointing.
    seed = torch.randint(2**31, ()) if call.dropout > 0 else None
    geometry = [call.query_offset, call.key_offset, int(call.causal)]
    tensors = (query, key, value, key_mask, *call.side, call.segment_ids, extras, call.row_lengths, seed)
    return forward_op(*tensors, geometry, pattern.key, call.scale, call.dropout, call.cap)


def _takes_sdpa(query: Tensor, key: Tensor, pattern: Pattern, key_mask: Tensor | None, call: _Call) -> bool:
    """Whether the call is plain dense attention on an accelerator, whose kernels need no compiling."""
    if query.device.type == "cpu" or pattern != FULL or key_mask is not None or call.needs_lse or call.cap:
        return False
    if call.segment_ids is not None or call.score_bias is not None or call.side[0] is not None:
        return False
    return not call.causal or (query.shape[2] == key.shape[2] and call.query_offset == call.key_offset)


def _takes_flex(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> bool:
    """Whether the compiled kernel takes the call: it has one pattern for all rows, biases by distance, no dropout."""
    if not flex_applies(query, key, value) or call.row_lengths is not None:
        return False
    if (call.score_bias is not None and not call.bias_is_relative) or (call.cap and call.side[0] is not None):
        return False
    if call.dropout > 0:
        _say_what_dropout_costs()
    return call.dropout == 0


@functools.cache
def _say_what_dropout_costs() -> None:
    warnings.warn(
        "Dropout on attention weights keeps FlexAttention's kernel out, and attention runs tile by tile, several times"
        " slower; train with `attention_probs_dropout_prob=0`.",
        stacklevel=2,
    )


def _join_side(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    side_key: Tensor,
    side_value: Tensor,
    side_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Join attention to side keys with a result that has been computed without them, by its log-sum-exp."""
    if side_mask is None:
        side_mask = torch.ones_like(side_key[:, 0, :, 0], dtype=torch.bool)
    hidden = ~(side_mask[:, None, None] if side_mask.ndim == 2 else side_mask[:, None])
    groups = (side_key.shape[1], -1)
    scores = scale * wide_products(query.unflatten(1, groups), side_key[:, :, None]).flatten(1, 2)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    side_lse = scores.logsumexp(-1).masked_fill(hidden.all(-1), -math.inf)
    weights = scores.softmax(-1).masked_fill(hidden, 0.0).to(query.dtype)
    side_out = (weights.unflatten(1, groups) @ side_value[:, :, None]).flatten(1, 2)
    top = torch.maximum(lse, side_lse).detach()
    top = top.masked_fill(top == -math.inf, 0.0)
    own, other = (lse - top).exp(), (side_lse - top).exp()
    total = own + other
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = (out * own[..., None] + side_out * other[..., None]) / total[..., None]
    return out.to(query.dtype), (top + total.log()).masked_fill(empty, -math.inf)


@torch.compiler.disable
def _bias_blocks(query: Tensor, key: Tensor, pattern: Pattern, score_bias: ScoreBias, call: _Call) -> list[Tensor]:
    """The score bias of every tile in the engine's order, each [1, H or 1, tiles or 1, rows, width]."""
    geometry, each = (call.query_offset, call.key_offset, call.causal), not call.bias_is_relative
    blocks = []
    runs = pieces_of_rows(query, key, call.side[0], call.row_lengths, geometry, pattern)
    for piece in (piece for _, pieces in runs for piece in pieces):
        for part in piece.parts:
            for tiles in part.tiles:
                q_at, k_at = (part.positions(tiles, which, each=each).to(query.device) + piece.shift for which in "qk")
                values = score_bias(q_at, k_at)
                values = (values if values.ndim > 3 else values[None]).movedim(-3, 0)[None]
                blocks.append(values[:, piece.heads] if values.shape[1] > 1 else values)
        for part in piece.side_parts:  # side keys have no position, hence no bias
            blocks += [query.new_zeros(1, 1, 1, tiles.rows, tiles.width) for tiles in part.tiles]
    return blocks


def _aligned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_mask: Tensor | None,
    padding_mask: Tensor | None,
    call: _Call,
) -> tuple[Tensor, Tensor | None]:
    """Run the engine with every row moved to the left by its leading padding, when the pattern would notice."""
    if padding_mask is None or not counts_positions(pattern, call.score_bias, call.bias_is_relative):
        return _engine(query, key, value, pattern, key_mask, call)
    lead, lengths = row_spans(padding_mask)
    if pattern.needs_length:
        call = call._replace(row_lengths=call.key_offset + lengths)
    if not _has_lead(padding_mask):
        return _engine(query, key, value, pattern, key_mask, call)
    q_len, k_len, offset = query.shape[2], key.shape[2], call.query_offset
    # Rows hold the queries at the aligned positions start .. offset + q_len - 1.
    most = k_len if offset == 0 or torch.compiler.is_compiling() else int(lead.max())
    start = 0 if offset == 0 else max(offset - most, 0)
    before = start - offset
    rows = torch.arange(q_len - before, device=query.device) + (before + lead[:, None])
    rows = rows.clamp(0, q_len - 1)
    columns = torch.arange(k_len, device=query.device) + lead[:, None]
    inside, columns = columns < k_len, columns.clamp(max=k_len - 1)
    side_key, side_value, side_mask = call.side
    if side_mask is not None and side_mask.ndim == 3:
        side_mask = side_mask.gather(1, rows[:, :, None].expand(-1, -1, side_mask.shape[2]))
    segment_ids = None if call.segment_ids is None else call.segment_ids.gather(1, columns)
    call = call._replace(query_offset=start, segment_ids=segment_ids, side=(side_key, side_value, side_mask))
    visible = inside if key_mask is None else inside & key_mask.gather(1, columns)
    out, lse = _engine(_take(query, rows), _take(key, columns), _take(value, columns), pattern, visible, call)
    # Back to where the queries came from; padding in front of the first token reads nothing.
    back = torch.arange(q_len, device=query.device) + (offset - start) - lead[:, None]
    real, back = (back >= 0)[:, None], back.clamp(min=0)
    out = torch.where(real[..., None], _take(out, back), 0.0)
    return out, None if lse is None else torch.where(real, _take(lse[..., None], back)[..., 0], -math.inf)


def _has_lead(padding_mask: Tensor) -> bool:
    """Whether any row starts with padding; "yes" where that is not looked at."""
    return not may_look(padding_mask) or bool((padding_mask.any(1) & ~padding_mask[:, 0]).any())


def _take(x: Tensor, index: Tensor) -> Tensor:
    """[B, H, T, d], [B, n] -> [B, H, n, d]."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _with_globals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_mask: Tensor | None,
    global_mask: Tensor,
    global_rows: tuple[Tensor, Tensor, Tensor],
    max_globals: int | None,
    call: _Call,
) -> Tensor:
    """Global keys leave the pattern (they would count twice) and come back as side keys; global rows are one more
    call."""
    chosen = global_mask if key_mask is None else global_mask & key_mask
    if max_globals is None:
        max_globals = int(chosen.sum(1).max())
    elif may_look(chosen) and int(chosen.sum(1).max()) > max_globals:
        raise ValueError(f"a row has {int(chosen.sum(1).max())} global tokens, more than max_globals={max_globals}.")
    if max_globals == 0:
        return _aligned(query, key, value, pattern, key_mask, key_mask, call)[0]
    if not call.causal and (query.shape[2] != key.shape[2] or call.query_offset != call.key_offset):
        raise ValueError(
            f"rows of global tokens need queries and keys of the same tokens, got {query.shape[2]} queries"
            f" at {call.query_offset} and {key.shape[2]} keys at {call.key_offset}; with causal=True global tokens are"
            " only read."
        )
    index = real_first(chosen)[:, :max_globals]
    taken = chosen.gather(1, index)
    visible = taken
    if call.causal:
        positions = call.query_offset + torch.arange(query.shape[2], device=query.device)
        visible = taken[:, None, :] & (call.key_offset + index[:, None, :] <= positions[:, None])
    local = ~chosen if key_mask is None else key_mask & ~chosen
    with_side = call._replace(side=(_take(key, index), _take(value, index), visible))
    out = _aligned(query, key, value, pattern, local, key_mask, with_side)[0]
    if call.causal:
        return out
    row_q, row_k, row_v = global_rows
    rows = _engine(_take(row_q, index), row_k, row_v, FULL, key_mask, call._replace(query_offset=0, key_offset=0))[0]
    rows = torch.where(taken[:, None, :, None], rows, _take(out, index))
    return out.scatter(2, index[:, None, :, None].expand_as(rows), rows)


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | Sequence[Pattern],
    masks: dict[str, Tensor | None],
    side: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout: float,
) -> Pattern:
    """Refuse shapes that do not fit; returns the pattern as one object."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"query, key and value must be [B, H, T, d], got {query.ndim}, {key.ndim} and {value.ndim} dimensions."
        )
    if (
        key.shape[:3] != value.shape[:3]
        or query.shape[0] != key.shape[0]
        or query.shape[3] != key.shape[3]
        or query.shape[1] % key.shape[1]
    ):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit: batch,"
            " lengths of key and value and head widths of query and key must agree, and the number of key heads must"
            " divide that of query heads."
        )
    for name, mask in masks.items():
        if mask is not None and tuple(mask.shape) != (key.shape[0], key.shape[2]):
            raise ValueError(f"{name} has shape {tuple(mask.shape)}; give [B, T_k] = {(key.shape[0], key.shape[2])}.")
        if mask is not None and name != "segment_ids" and mask.dtype != torch.bool:
            raise ValueError(f"{name} is {mask.dtype}; give a boolean mask, True for a token that counts.")
    side_key, side_value, side_mask = side
    if (side_key is None) != (side_value is None) or (side_key is None and side_mask is not None):
        raise ValueError("side_key, side_value and side_mask belong together; give side_key and side_value.")
    if side_mask is not None and side_mask.dtype != torch.bool:
        raise ValueError(f"side_mask is {side_mask.dtype}; give a boolean mask, True for a key that may be read.")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} is not a probability below 1.")
    if not isinstance(pattern, Pattern):
        if not (isinstance(pattern, Sequence) and pattern and all(isinstance(entry, Pattern) for entry in pattern)):
            raise TypeError(f"pattern must be a Pattern or one per head, not {type(pattern).__name__}.")
        pattern = PerHead(tuple(pattern))
    pattern.check_heads(query.shape[1])
    return pattern
