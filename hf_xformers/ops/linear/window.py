# SPDX-License-Identifier: Apache-2.0
"""Softmax over a sliding window and linear attention over everything beyond it, under one normalizer.

With `W_i` the keys nearer to query `i` than `window` tokens (among those that it may see), `c_i` its largest score in
there and features `phi`,

    out_i = (sum_{j in W_i} gamma exp(s_ij - c_i) v_j + beta sum_{j not in W_i} phi(q_i) phi(k_j) v_j)
          / (sum_{j in W_i} gamma exp(s_ij - c_i) + beta sum_{j not in W_i} phi(q_i) phi(k_j)),   s_ij = scale q_i k_j.

Zhang et al. 2024, "LoLCATs: On Low-Rank Linearizing of Large Language Models" (arXiv 2410.10254), section 3.3.1, where
beta is 1. The first real tokens of a text, its `sinks`, may belong to every W_i (Xiao et al. 2023, arXiv 2309.17453).
Tokens are taken in chunks: a query writes out its pairs with its own chunk and those that its window reaches into, and
reads the sums of the others. Time and memory grow with the length, the state for decoding does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.padding import check_padding_mask, may_look
from ..common.segments import accumulation_dtype
from .kernels import inverse_or_zero

# Without gradients, chunks are read in turn that have so many pairs together: what is written out stays small.
_PAIRS_AT_ONCE = 1 << 22
_CHUNKS = 4  # that a window has at most
FeatureMap = Callable[[Tensor], Tensor]  # [B, H, t, d] -> [B, H, t, F], token by token


class WindowState(NamedTuple):
    """What is remembered of a text: its last `window - 1` tokens, and the sums over those before them. The size does
    not grow with the text, apart from texts that are shorter than the window."""

    key: Tensor  # [B, K, n, d], n <= window - 1
    value: Tensor  # [B, K, n, dv]
    real: Tensor  # [B, n], False at padding
    kv: Tensor  # [B, H, F, dv], sum of phi(k_j)^T v_j, float32 at least
    z: Tensor  # [B, H, F], sum of phi(k_j)
    sink_key: Tensor | None = None  # [B, K, k, d], of the first real tokens, which are in no sum
    sink_value: Tensor | None = None  # [B, K, k, dv]
    sink_real: Tensor | None = None  # [B, k], False where a text has not that many yet


def window_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    gamma: Tensor,
    *,
    window: int,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
    state: WindowState | None = None,
    chunk_size: int = 64,
    sinks: int = 0,
    linear_weight: Tensor | None = None,
) -> tuple[Tensor, WindowState | None]:
    """The equation above.

    Args:
        query, key, value: `[B, H, T, d]`, `[B, K, T, d]` and `[B, K, T, dv]`, K dividing H.
        query_map, key_map: features of queries and keys, not negative.
        gamma: `[H]`, positive weight of the window.
        window: tokens that a query sees with a softmax, itself included; where not causal, on either side.
        causal: later keys are hidden; needed for a state.
        scale: factor on scores.
        key_padding_mask: `[B, T]`, True = real token.
        state: of the earlier tokens of these texts.
        chunk_size: least number of tokens in a chunk.
        sinks: how many of the first real tokens every query sees with a softmax, next to its window.
        linear_weight: `[H]`, beta (None: 1).

    Returns:
        `[B, H, T, dv]` in the dtype of `value`, zeros for a query that sees nothing; and, if causal, the state after
        these tokens.

    Raises:
        ValueError: `window` below 1, a mask that is not `[B, T]`, or a state where attention is not causal.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}.")
    if state is not None and not causal:
        raise ValueError("Only causal attention continues a state; set `causal=True` or leave `state` out.")
    check_padding_mask(key_padding_mask, key.shape[0], key.shape[2])
    dtype = accumulation_dtype(value.dtype)
    with torch.autocast(value.device.type, enabled=False):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        length, before = query.shape[2], 0
        real = key.new_ones(key.shape[0], length, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        beta = None if linear_weight is None else linear_weight.to(dtype)[:, None, None, None]
        mix = _Mix(query_map, key_map, gamma.to(dtype)[:, None, None, None], beta, window, causal, scale)
        if length == 1 and state is not None:
            return _step(mix, query, key, value, real, state, sinks)
        side, given = None, [(key, value)]
        if sinks:
            side, real = _take_sinks(key, value, real, state, sinks, causal)
        if state is not None:
            before = state.key.shape[2]
            given.insert(0, (state.key.to(dtype), state.value.to(dtype)))
            real = torch.cat([state.real, real], dim=1)
        count = before + length
        all_near = length <= 1 or count <= window
        if all_near and side is not None:
            given.append((side.key, side.value))
        key, value = (torch.cat(parts, dim=2) for parts in zip(*given, strict=True))
        if all_near:
            sums = None if state is None else (state.kv[:, :, None], state.z[:, :, None])
            if state is None and torch.is_grad_enabled():  # over no keys: the maps' gradients are zero, not missing
                none, nothing = (_for_heads(x[:, :, :0], query) for x in (key, value))
                kv, z = _sums(mix, none, nothing, real[:, :0])
                sums = kv[:, :, None], z[:, :, None]
            visible = real[:, None, None, None]
            if length > 1:
                visible = visible & mix.near(torch.arange(before, count, device=query.device), count)[1]
            if side is not None:
                visible = torch.cat([visible.expand(-1, -1, -1, length, -1), side.visible[:, None, None]], dim=-1)
            out = mix(query[:, :, None], key[:, :, None], value[:, :, None], visible, sums)[:, :, 0]
            key, value = key[:, :, :count], value[:, :, :count]
        else:
            out = _in_chunks(mix, query, key, value, real, before, state, side, max(chunk_size, -(-window // _CHUNKS)))
        return out, _after(mix, query, key, value, real, state, side) if causal else None


class _Sinks(NamedTuple):
    """Keys and values that every query sees which `visible` says."""

    key: Tensor  # [B, K, k, d]
    value: Tensor  # [B, K, k, dv]
    real: Tensor  # [B, k]
    visible: Tensor  # [B, T, k]; in chunks [B, 1, N, C, k], and keys and values [B, K, N, k, d]

    def chunked(self, chunk: int) -> _Sinks:
        tail = -self.visible.shape[1] % chunk
        visible = F.pad(self.visible, (0, 0, 0, tail)).unflatten(1, (-1, chunk))[:, None]
        key, value = (x[:, :, None].expand(-1, -1, visible.shape[2], -1, -1) for x in self[:2])
        return _Sinks(key, value, self.real, visible)


def _take_sinks(
    key: Tensor, value: Tensor, real: Tensor, state: WindowState | None, sinks: int, causal: bool
) -> tuple[_Sinks, Tensor]:
    """The first real tokens of texts that continue with these keys, and `real` `[B, T]` without them."""
    rank = real.long().cumsum(-1) - 1
    held = None if state is None else cast("tuple[Tensor, Tensor, Tensor]", state[-3:])
    if held is not None:
        rank = rank + held[2].sum(-1, keepdim=True)
    hit = real[:, None] & (rank[:, None] == torch.arange(sinks, device=key.device)[:, None])  # [B, k, T]
    new, place = hit.any(-1), hit.int().argmax(-1)
    index, fresh = place[:, None, :, None], new[:, None, :, None]
    keys, values = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
    if held is None:  # zeros, not whatever stood at the first slot
        keys, values, found = keys.masked_fill(~fresh, 0.0), values.masked_fill(~fresh, 0.0), new
    else:
        keys, values = (
            torch.where(fresh, x, old.to(x.dtype)) for x, old in zip((keys, values), held[:2], strict=True)
        )
        found = new | held[2]
    visible = found[:, None].expand(-1, key.shape[2], -1)
    if causal:
        order = torch.arange(key.shape[2], device=key.device)[:, None]
        visible = visible & (~new[:, None] | (place[:, None] <= order))
    return _Sinks(keys, values, found, visible), real & (rank >= sinks)


class _Mix(NamedTuple):
    """The equation for queries and keys that stand next to each other."""

    query_map: FeatureMap
    key_map: FeatureMap
    gamma: Tensor  # [H, 1, 1, 1]
    beta: Tensor | None  # [H, 1, 1, 1]
    window: int
    causal: bool
    scale: float

    def features(self, feature_map: FeatureMap, x: Tensor) -> Tensor:
        """Of `[B, H, N, C, d]`."""
        return feature_map(x.flatten(2, 3)).unflatten(2, x.shape[2:4])

    def near(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Of `count` keys: which stand in the window of queries at `places [C]`, `[C, S]`, and which of these a query
        may see."""
        distance = places[:, None] - torch.arange(count, device=places.device)
        near = (distance if self.causal else distance.abs()) < self.window
        return near, near & (distance >= 0) if self.causal else near

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        sums: tuple[Tensor, Tensor] | None,
        phi: Tensor | None = None,
        near: Tensor | None = None,
    ) -> Tensor:
        """query `[B, H, N, C, d]`, key and value `[B, K, N, S, d]`, K dividing H; visible `[B, 1, N, C, S]`: with a
        softmax; sums: `kv [B, H, N, F, dv]` and `z [B, H, N, F]` of the keys elsewhere; phi: features
        `[B, H, N, s, F]` of the first s keys, zero at padding, and near `[C, S]`: those that do not count as features
        (None: all keys are near)."""
        few, groups = key.shape[1], query.shape[1] // key.shape[1]
        rows = _by_keys(query * self.scale, few)
        scores = (rows @ key.mT).unflatten(3, (groups, -1))  # [B, K, N, H / K, C, S]: too large to be copied
        scores = scores.masked_fill_(~visible[:, :, :, None], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        # The largest of these is 1 / sum_j exp(s_ij - c_i).
        largest = _by_heads(weights.amax(-1, keepdim=True).flatten(3, 4), groups)
        total = self.gamma * visible.any(-1, keepdim=True) / largest
        out = _by_heads(weights.flatten(3, 4) @ value, groups) * total
        if sums is not None:
            phi_q = self.features(self.query_map, query)
            phi_q = phi_q if self.beta is None else phi_q * self.beta
            total, out = total + phi_q @ sums[1][..., None], out + phi_q @ sums[0]
            if phi is not None and near is not None:
                count = phi.shape[3]
                weights = (phi_q @ phi.mT).masked_fill_(near[:, :count], 0.0)
                total = total + weights.sum(-1, keepdim=True)
                out = out + _by_heads(_by_keys(weights, few) @ value[..., :count, :], groups)
        return out * inverse_or_zero(total)


def _by_keys(x: Tensor, few: int) -> Tensor:
    """`[B, H, N, C, x]` -> `[B, K, N, H / K * C, x]`: the heads that share a head of keys are rows of one product."""
    return x if x.shape[1] == few else x.unflatten(1, (few, -1)).transpose(2, 3).flatten(3, 4)


def _by_heads(x: Tensor, groups: int) -> Tensor:
    """`[B, K, N, H / K * C, x]` -> `[B, H, N, C, x]`."""
    return x if groups == 1 else x.unflatten(3, (groups, -1)).transpose(2, 3).flatten(1, 2)


def _step(
    mix: _Mix, query: Tensor, key: Tensor, value: Tensor, real: Tensor, state: WindowState, sinks: int
) -> tuple[Tensor, WindowState]:
    """One token of each text, and the state after it. Its time goes with the number of operations and the bytes that
    they touch: sinks and window are one tensor, of which the next state is a part."""
    first, here = state[5:], real
    keys, values, near = [state.key.to(key.dtype), key], [state.value.to(value.dtype), value], state.real
    if sinks:
        sink_key, sink_value, taken = cast("tuple[Tensor, Tensor, Tensor]", first)
        if not (may_look(taken) and bool(taken.all())):
            count = taken.sum(-1, keepdim=True)
            new = real & (count == torch.arange(sinks, device=key.device))
            chosen, here = new[:, None, :, None], real & (count >= sinks)
            sink_key, sink_value = torch.where(chosen, key, sink_key), torch.where(chosen, value, sink_value)
            taken = taken | new
        keys, values, near = [sink_key, *keys], [sink_value, *values], torch.cat([taken, near], dim=1)
    key, value, near = torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat([near, here], dim=1)
    visible = near[:, None, None]
    heads = (*query.shape[:3], -1)
    asked = (query * mix.scale).view(query.shape[0], key.shape[1], -1, query.shape[3])
    weights = torch.softmax((asked @ key.mT).masked_fill(~visible, torch.finfo(key.dtype).min), dim=-1)
    # The largest weight is 1 / sum_j exp(s_j - c).
    total = mix.gamma[:, 0] * visible.any(-1, keepdim=True) / weights.amax(-1).view(heads)
    phi = mix.query_map(query)
    phi = phi if mix.beta is None else phi * mix.beta[:, 0]
    out = (weights @ value).view(heads) * total + phi @ state.kv
    out = out * inverse_or_zero(total + phi @ state.z[..., None])
    kv, z, left = state.kv, state.z, sinks
    if state.key.shape[2] == mix.window - 1:  # the oldest token leaves the window
        left = sinks + 1
        oldest = slice(sinks, left)
        phi = mix.key_map(_for_heads(key[:, :, oldest], query)) * near[:, None, oldest, None]
        kv, z = torch.addcmul(kv, phi.mT, _for_heads(value[:, :, oldest], query)), z + phi[:, :, 0]
    if sinks:
        first = key[:, :, :sinks], value[:, :, :sinks], near[:, :sinks]
    return out, WindowState(key[:, :, left:], value[:, :, left:], near[:, left:], kv, z, *first)


def _in_chunks(
    mix: _Mix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor,
    before: int,
    state: WindowState | None,
    side: _Sinks | None,
    chunk: int,
) -> Tensor:
    """Keys begin `before < window` tokens ahead of the queries."""
    length = query.shape[2]
    ahead = -(-mix.window // chunk)  # chunks that a window reaches into, next to the query's own
    tail, lead = -length % chunk, ahead * chunk - before

    def chunked(x: Tensor, lead: int) -> Tensor:
        return F.pad(x, (0, 0, lead, tail)).unflatten(2, (-1, chunk))

    query = chunked(query, 0)
    key, value = chunked(key, lead), chunked(value, lead)
    real = F.pad(real, (lead, tail)).unflatten(1, (-1, chunk))[:, None]
    phi = mix.features(mix.key_map, _for_heads(key, query)).masked_fill(~real[..., None], 0.0)
    kv, z = phi.mT @ _for_heads(value, query), phi.sum(3)
    # The n-th chunk of queries stands at the (n + ahead)-th of keys, whose neighbours' pairs are written out.
    count = query.shape[2]
    kv_sums, z_sums = _before(kv, count), _before(z, count)
    if state is not None:
        kv_sums, z_sums = kv_sums + state.kv[:, :, None], z_sums + state.z[:, :, None]
    around = ahead + 1
    if mix.causal:  # only in the first chunks there are keys that some query has left behind
        reached = min(around, 1 if mix.window == ahead * chunk else 2)
    else:
        key, value, phi, kv = (F.pad(x, (0, 0, 0, 0, 0, ahead)) for x in (key, value, phi, kv))
        real, z = (F.pad(x, (0, 0, 0, ahead)) for x in (real, z))
        kv_sums, z_sums = (x + _before(y.flip(2), count).flip(2) for x, y in ((kv_sums, kv), (z_sums, z)))
        reached = around = 2 * ahead + 1
    near, seen = mix.near(torch.arange(ahead * chunk, (ahead + 1) * chunk, device=query.device), around * chunk)
    beside = None if side is None else side.chunked(chunk)

    def read(first: int, last: int) -> Tensor:
        def spans(x: Tensor, width: int) -> list[Tensor]:
            return [x[:, :, first + place : last + place] for place in range(width)]

        part = slice(first, last)
        keys, values = spans(key, around), spans(value, around)
        visible = seen & torch.cat(spans(real, around), dim=3)[..., None, :]
        if beside is not None:
            keys.append(beside.key[:, :, part])
            values.append(beside.value[:, :, part])
            visible = torch.cat([visible, beside.visible[:, :, part]], dim=-1)
        features = torch.cat(spans(phi, reached), dim=3)
        sums = kv_sums[:, :, part], z_sums[:, :, part]
        return mix(query[:, :, part], torch.cat(keys, 3), torch.cat(values, 3), visible, sums, features, near)

    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        step = count
    else:
        step = max(1, _PAIRS_AT_ONCE // (query.shape[0] * query.shape[1] * chunk * chunk * around))
    out = torch.cat([read(first, min(first + step, count)) for first in range(0, count, step)], dim=2)
    return out.flatten(2, 3)[:, :, :length]


def _for_heads(x: Tensor, query: Tensor) -> Tensor:
    """`x [B, K, ...]` once for each of the query's heads."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, *x.shape[2:]).flatten(1, 2)


def _before(sums: Tensor, count: int) -> Tensor:
    """Of chunks 0..M: for each of the first `count` ones the total of those before it."""
    total = sums[:, :, : count - 1].cumsum(2)
    return torch.cat([torch.zeros_like(sums[:, :, :1]), total], dim=2)


def _sums(mix: _Mix, key: Tensor, value: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """sum phi(k_j)^T v_j `[B, H, F, dv]` and sum phi(k_j) `[B, H, F]` over keys `[B, H, n, d]`."""
    phi = mix.key_map(key).masked_fill(~real[:, None, :, None], 0.0)
    return phi.mT @ value, phi.sum(2)


def _after(
    mix: _Mix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor,
    state: WindowState | None,
    side: _Sinks | None,
) -> WindowState:
    """The state when the window has moved on past these keys."""
    leaving = max(key.shape[2] - (mix.window - 1), 0)
    gone, passed = (_for_heads(x[:, :, :leaving], query) for x in (key, value))
    kv, z = _sums(mix, gone, passed, real[:, :leaving])
    if state is not None:
        kv, z = kv + state.kv, z + state.z
    first = (None, None, None) if side is None else side[:3]
    return WindowState(key[:, :, leaving:], value[:, :, leaving:], real[:, leaving:], kv, z, *first)
