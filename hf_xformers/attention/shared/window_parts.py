# SPDX-License-Identifier: Apache-2.0
"""Attention over a pattern of positions where every process holds a part of each text.

A part reads what its windows reach beyond its borders from the processes that hold it. Keys that all tokens read
(global tokens, the first of a text) go to all processes; rows that read all tokens are computed by every process on
its own tokens and merged by their denominators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.call import Call
from ...core.sequence_parallel import SequenceForm, Unserved
from ...core.text_parts import Span, TextParts
from ...ops.block_sparse.attention import block_sparse_attention
from ...ops.block_sparse.patterns import Pattern
from ...ops.common.products import wide_products, widened
from ...ops.common.real_tokens import real_first

Inputs = tuple[Tensor, Tensor, Tensor]


class Beside(NamedTuple):
    """Keys that queries read next to the pattern: keys and values [B, K, n, d], and who reads them, [B, n] or
    [B, t, n]; hidden: [B, T], the keys that leave the pattern for it, or None."""

    key: Tensor
    value: Tensor
    mask: Tensor
    hidden: Tensor | None = None


def form_of_window(spec: Any, config: Any, form: SequenceForm) -> SequenceForm | Unserved:
    """`form`, if the patterns of all layers of an attention end near their queries."""
    for layer in range(config.num_hidden_layers):
        pattern = spec.pattern(config, layer)
        for each in {pattern.for_head(head) for head in range(config.num_attention_heads)}:
            low, high = each.span(0, 0)
            if low is None or (high is None and not config.is_decoder) or pattern.needs_length:
                return Unserved("as it is set reads keys of a text at any distance")
    return form


def spans_of_parts(pattern: Pattern, heads: int, parts: TextParts, causal: bool) -> list[Span]:
    """The tokens of the text that each process's queries may read, its own included: (first, behind the last)."""
    each, spans = {pattern.for_head(head) for head in range(heads)}, []
    for rank in range(parts.count):
        first, last = rank * parts.length, (rank + 1) * parts.length - 1
        found = [one.span(first, last) for one in each]
        low = min(first, *(0 if low is None else low for low, _ in found))
        end = parts.total_length - 1
        high = last if causal else max(last, *(end if high is None else high for _, high in found))
        spans.append((max(low, 0), min(high, end) + 1))
    return spans


def attend_to_window(attention: Any, given: Inputs, context: Call, beside: Beside | None = None) -> Any:
    """What the queries of this part read, [B, H, t, d], or that and the logarithm of the denominators [B, H, t] where
    learned sinks need it."""
    (query, key, value), parts = given, _parts(context)
    pattern, causal = attention.pattern, attention.is_causal
    _check_padding(pattern, parts)
    spans = spans_of_parts(pattern, attention.num_heads, parts, causal)
    first, last = spans[parts.rank]
    key, value = parts.spread(torch.cat([key, value], dim=1), spans).chunk(2, dim=1)
    bias, mask = attention.score_bias(context), parts.mask
    if beside is not None and beside.hidden is not None:
        mask = ~beside.hidden if mask is None else mask & ~beside.hidden
    more: dict[str, Any] = {}
    if beside is not None:
        more = {"side_key": beside.key, "side_value": beside.value, "side_mask": beside.mask}
    return block_sparse_attention(
        query,
        key,
        value,
        pattern,
        key_padding_mask=None if mask is None else mask[:, first:last],
        query_offset=parts.start,
        key_offset=first,
        causal=causal,
        scale=attention.scaling,
        dropout=attention.dropout if attention.training else 0.0,
        score_bias=None if bias is None else bias.block,
        bias_is_relative=bias is not None,
        segment_ids=None if parts.documents is None else parts.documents[:, first:last],
        score_cap=attention.spec.score_cap,
        return_lse=attention.sinks is not None,
        **more,
    )


def attend_with_globals(
    attention: Any, given: Inputs, rows: Inputs, context: Call, chosen: Tensor, most: int
) -> Tensor:
    """The same with tokens that all others read, and that read all: chosen [B, T] of whole rows, at most `most` in a
    row. rows: queries, keys and values of their own rows. [B, H, t, d]."""
    parts, dropout = _parts(context), attention.dropout if attention.training else 0.0
    places = real_first(chosen)[:, :most]
    taken = chosen.gather(1, places)
    key, value = parts.chosen(torch.cat(given[1:], dim=1), places).chunk(2, dim=1)
    output = attend_to_window(attention, given, context, Beside(key, value, taken, chosen))
    row_query = parts.chosen(rows[0], places)
    row_key, row_value = attention.repeated(rows[1]), attention.repeated(rows[2])
    scores = wide_products(row_query, row_key) * attention.scaling
    if parts.mask is not None:
        scores = scores.masked_fill(~parts.own(parts.mask)[:, None, None], -torch.inf)
    top = parts.largest(scores.amax(-1, keepdim=True))
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    read = F.dropout(weights, dropout) @ widened(row_value)[0].to(weights.dtype)
    both = parts.total(torch.cat([read, weights.sum(-1, keepdim=True)], dim=-1))
    total = both[..., -1:]
    whole = (both[..., :-1] / total.masked_fill(total == 0, 1.0)).to(output.dtype)
    inside = taken & (places >= parts.start) & (places < parts.start + parts.length)
    index = torch.where(inside, places - parts.start, parts.length)[:, None, :, None].expand_as(whole)
    return F.pad(output, (0, 0, 0, 1)).scatter(2, index, whole)[:, :, :-1]


def _parts(context: Call) -> TextParts:
    if context.parts is None:
        raise ValueError("There are no parts of texts outside of `sequence_parallel`; call the model inside of it.")
    return context.parts


def _check_padding(pattern: Pattern, parts: TextParts) -> None:
    """A pattern that counts positions counts them from a text's first token, which has to be that of its row here."""
    mask = parts.mask
    if pattern.period != 1 and mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(
            "Under sequence parallelism blocks of tokens begin with the first of their row, so padding may stand on"
            " the right alone, and not between tokens; pad there (`part_of_batch` moves padding on the left)."
        )
