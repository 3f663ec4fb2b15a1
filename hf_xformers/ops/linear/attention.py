# SPDX-License-Identifier: Apache-2.0
"""Normalized kernel attention in linear time, from feature-mapped queries and keys.

With positive (or at least mostly positive) features `phi` of width `F`,

    out_i = sum_j w_j (phi(q_i) . phi(k_j)) v_j / sum_j w_j (phi(q_i) . phi(k_j)),

where `j` runs over the visible keys and the optional `w_j = exp(log_weight_j)` are weights of the keys. Because the
features factorize the weight, the sums over `j` are two small matrices. Katharopoulos et al., "Transformers are RNNs",
ICML 2020, equations 4-6 (bidirectional) and 8-12 (causal).

Four forms of the same function: two matrix products (bidirectional), all pairs (bidirectional, where a text is shorter
than features are wide and nobody asks for a state), a scan over chunks (causal: quadratic inside a chunk, a state
between chunks), and one recurrent step (a single new token with a state).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.padding import check_padding_mask
from ..common.products import without_autocast
from ..common.segments import accumulation_dtype, in_one_batch, masked
from .batched_scan import BatchedCausalScan
from .delta_rule import delta_rule
from .fla import sums_kernel
from .folded import FoldedSums, folded_sums, read_folded_sums
from .kernels import LOG_ZERO, CausalScan, Read, Write, guard, inverse_or_zero, vanishes
from .pairs import Pairs, pairs_are_fewer
from .reference import delta_rule_reference, linear_attention_reference

__all__ = [
    "FoldedSums",
    "LinearState",
    "delta_rule",
    "delta_rule_reference",
    "folded_sums",
    "kernel_attention",
    "kernel_attention_read",
    "kernel_attention_write",
    "linear_attention",
    "linear_attention_read",
    "linear_attention_reference",
    "linear_attention_write",
    "read_folded_sums",
    "vanishes",
]


class LinearState(NamedTuple):
    """What linear attention remembers of the keys so far; constant in the sequence length.

    The true sums are `kv * exp(log_scale)` and `z * exp(log_scale)`; `log_scale` is None when no key carries a
    `log_weight`. All tensors are float32 (float64 for float64 inputs), whatever the dtype of the inputs.
    """

    kv: Tensor  # [B, H, F, dv], sum of phi(k_j)^T v_j
    z: Tensor  # [B, H, F], sum of phi(k_j)
    log_scale: Tensor | None = None  # [B, H], running maximum of log_weight, in its type where that is wider


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    log_weight: Tensor | None = None,
    rotated_query: Tensor | None = None,
    rotated_key: Tensor | None = None,
    state: LinearState | tuple | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    eps: float = 0.0,
    min_denominator: float = 0.0,
    normalize: bool = True,
) -> Tensor | tuple[Tensor, LinearState]:
    """Attention whose weights are dot products of features.

    Args:
        query: features of the queries, `[B, H, T, F]`. Nothing is scaled here.
        key: features of the keys, `[B, H, S, F]`; `S == T` when causal.
        value: values, `[B, H, S, dv]`.
        causal: query `i` sees keys `0..i` (and everything in `state`).
        key_padding_mask: `[B, S]`, True = real token. Applied to the features, so that maps with phi(0) != 0 are safe.
        log_weight: `[B, H, S]`, logarithm of a weight of each key. Summed under a running maximum, so any magnitude is
            safe, and no query is touched by the weight of a later key, not even by underflow. In float64 its digits
            are kept where causal, for logarithms that are themselves sums over a long text.
        rotated_query, rotated_key: same shapes as the features; replace them in the numerator only (rotary positions
            with a kernelised attention: rotated features may be negative and must stay out of the denominator).
        state: sums over earlier keys, as returned with `return_state`; not rotated twice, not masked.
        return_state: also return the sums over `state` and all keys of this call.
        chunk_size: tokens per quadratic block of the causal scan.
        eps: added to the denominator (with `log_weight`: to the denominator relative to the largest weight so far).
        min_denominator: denominators smaller than this in magnitude (relative, likewise) are replaced by it, with
            their sign; for features whose products can be negative.
        normalize: False leaves the denominator out (fast-weight sum rule, Luna's causal function).

    Returns:
        `[B, H, T, dv]` in the dtype of `value`; with `return_state` also a [`LinearState`]. A query that sees no key
        gets 0. Sums run in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit, a mask that is not `[B, S]`, `chunk_size < 1`, one rotated tensor without
            the other, or `normalize=False` together with `log_weight` or rotated features.
    """
    _check(query, key, value, causal, key_padding_mask, log_weight, rotated_query, rotated_key, chunk_size, normalize)
    keys, options = _Keys(key, rotated_key, value, key_padding_mask, log_weight), (eps, min_denominator, normalize)
    width, scaled = key.shape[-1], log_weight is not None
    if not causal and state is None and not return_state and _few_pairs(query, keys, width):
        return _all_pairs(query, rotated_query, keys, options)
    start = _given_state(width, scaled, value, state)
    if causal:
        out, end = _scan(query, rotated_query, keys, start, width, scaled, return_state, chunk_size, options)
    else:
        end = _add_keys(start, keys, width, scaled)
        out = Read.apply(query, rotated_query, end.kv, end.z, value.dtype, *options, None)
    return (out, end) if return_state else out


def linear_attention_write(
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_weight: Tensor | None = None,
    rotated_key: Tensor | None = None,
    state: LinearState | tuple | None = None,
) -> LinearState:
    """The sums over a set of keys, for [`linear_attention_read`]: what cross-attention computes and caches once.

    Arguments as in [`linear_attention`].
    """
    _check(key, key, value, False, key_padding_mask, log_weight, rotated_key, rotated_key, 1, True)
    keys, scaled = _Keys(key, rotated_key, value, key_padding_mask, log_weight), log_weight is not None
    return _add_keys(_given_state(key.shape[-1], scaled, value, state), keys, key.shape[-1], scaled)


def linear_attention_read(
    query: Tensor,
    state: LinearState | tuple,
    *,
    rotated_query: Tensor | None = None,
    eps: float = 0.0,
    min_denominator: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """Attention of features `[B, H, T, F]` to the sums of a state; arguments as in [`linear_attention`]."""
    return Read.apply(query, rotated_query, state[0], state[1], query.dtype, eps, min_denominator, normalize, None)


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: Callable[..., Tensor | tuple[Tensor, Tensor]],
    *params: Tensor,
    key_map: Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    log_weight: Tensor | None = None,
    state: LinearState | tuple | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    eps: float = 0.0,
    min_denominator: float = 0.0,
    normalize: bool = True,
) -> Tensor | tuple[Tensor, LinearState]:
    """[`linear_attention`] with the feature map inside, evaluated on one segment of the sequence at a time.

    Wide features (256 random ones for a head of 64, say) then cost memory for a segment only, forward and backward, at
    the price of computing them twice in training.

    Args:
        query, key: queries and keys, `[B, H, T, d]` and `[B, H, S, d]`, scaled as the map wants them.
        feature_map: deterministic function `feature_map(x, *params)` of pieces `[B, H, t, d]`, token by token, giving
            features `[B, H, t, F]` or a pair of features and log factors `[B, H, t]`, such as `positive_features`.
            Only `x` and `params` receive gradients: pass learned tensors as params.
        key_map: another function for the keys.
    The others, the result and the errors are those of [`linear_attention`]; a map with log factors takes no
    `log_weight` besides them.
    """
    _check(query, key, value, causal, key_padding_mask, log_weight, None, None, chunk_size, normalize)
    key_map, options, dtype = (
        key_map or feature_map,
        (eps, min_denominator, normalize),
        accumulation_dtype(value.dtype),
    )
    phi_q: Tensor | None
    single = causal and key.shape[2] == 1
    if single and key_map is feature_map:  # a decoding step: both at once
        both, logs = _pair(feature_map(torch.cat([query, key], dim=2).to(dtype), *params))
        (phi_q, phi_k), logs = both.chunk(2, dim=2), None if logs is None else logs[:, :, 1:]
    else:  # one key tells how wide the features are and whether they come with a log factor
        one_key = key if key.shape[2] == 1 else key[:, :, :1].detach()
        phi_k, logs = _pair(key_map(one_key.to(dtype), *params))
        phi_q = _pair(feature_map(query.to(dtype), *params))[0] if single else None
    if logs is not None and log_weight is not None:
        raise ValueError("A feature map with log factors takes no log_weight; leave it out, or add it in the map.")
    given, log_weight = log_weight, logs if log_weight is None else log_weight
    width, scaled = phi_k.shape[-1], log_weight is not None
    start = _given_state(width, scaled, value, state)
    if start is not None and start.log_scale is not None and log_weight is None:
        raise ValueError("The state was written by a feature map with log factors, but this feature map gives none.")
    if log_weight is not None and not normalize:
        raise ValueError("normalize=False has no denominator, so it takes no feature map with log factors.")
    keys = _Keys(key, None, value, key_padding_mask, given, key_map, params)
    if not causal:
        if start is None and not return_state and _few_pairs(query, keys, width):
            return _all_pairs(query, None, keys, options, feature_map)
        end = _add_keys(start, keys, width, scaled)
        out = Read.apply(query, None, end.kv, end.z, value.dtype, *options, feature_map, *params)
        return (out, end) if return_state else out
    if phi_q is not None:
        start = start or _empty_state(width, scaled, value)
        out, end = _step(phi_q, None, _Keys(phi_k, None, value, key_padding_mask, log_weight), start, options)
    else:
        out, end = _scan(query, None, keys, start, width, scaled, return_state, chunk_size, options, feature_map)
    return (out, end) if return_state else out


def kernel_attention_write(
    key: Tensor,
    value: Tensor,
    feature_map: Callable[..., Tensor | tuple[Tensor, Tensor]],
    *params: Tensor,
    key_padding_mask: Tensor | None = None,
) -> LinearState:
    """[`linear_attention_write`] with the feature map of the keys inside; arguments as in [`kernel_attention`]."""
    _check(key, key, value, False, key_padding_mask, None, None, None, 1, True)
    phi, logs = _pair(feature_map(key[:, :, :1].detach().to(accumulation_dtype(value.dtype)), *params))
    keys = _Keys(key, None, value, key_padding_mask, None, feature_map, params)
    return _add_keys(None, keys, phi.shape[-1], logs is not None)


def kernel_attention_read(
    query: Tensor,
    state: LinearState | tuple,
    feature_map: Callable[..., Tensor | tuple[Tensor, Tensor]],
    *params: Tensor,
    eps: float = 0.0,
    min_denominator: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """[`linear_attention_read`] with the feature map of the queries inside; arguments as in [`kernel_attention`]."""
    options = eps, min_denominator, normalize
    return Read.apply(query, None, state[0], state[1], query.dtype, *options, feature_map, *params)


def _check(query, key, value, causal, mask, log_weight, rotated_query, rotated_key, chunk_size, normalize) -> None:
    batch, heads, length, width = key.shape
    if query.shape[:2] != (batch, heads) or query.shape[3] != width or value.shape[:3] != (batch, heads, length):
        raise ValueError(
            f"Features of queries {tuple(query.shape)}, features of keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)} must be [B, H, T, F], [B, H, S, F] and [B, H, S, dv]."
        )
    if causal and query.shape[2] != length:
        raise ValueError(f"Causal attention needs as many queries as keys, got {query.shape[2]} and {length}.")
    check_padding_mask(mask, batch, length)
    if log_weight is not None and log_weight.shape != (batch, heads, length):
        raise ValueError(f"log_weight must be {(batch, heads, length)}, got {tuple(log_weight.shape)}.")
    if (rotated_query is None) != (rotated_key is None):
        raise ValueError("rotated_query and rotated_key belong together: give both or neither.")
    if rotated_query is not None and (rotated_query.shape != query.shape or rotated_key.shape != key.shape):
        raise ValueError("rotated_query and rotated_key must have the shapes of query and key.")
    if not normalize and (log_weight is not None or rotated_query is not None):
        raise ValueError("normalize=False has no denominator, so it takes neither log_weight nor rotated features.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")


class _Keys(NamedTuple):
    """Keys of one call: features, or raw keys with their map."""

    k: Tensor
    rotated: Tensor | None
    v: Tensor
    mask: Tensor | None
    log_weight: Tensor | None
    feature_map: Callable | None = None
    params: tuple[Tensor, ...] = ()


def _few_pairs(q: Tensor, keys: _Keys, width: int) -> bool:
    return pairs_are_fewer(q.shape[2], keys.k.shape[2], width, keys.v.shape[3])


def _all_pairs(q, rotated_query, keys: _Keys, options, feature_map=None) -> Tensor:
    return Pairs.apply(
        *(q, keys.k, rotated_query, keys.rotated, keys.v, keys.mask, keys.log_weight),
        *(*options, feature_map, keys.feature_map, *keys.params),
    )


def _scan(q, rotated_query, keys: _Keys, start, width, scaled, remember, chunk_size, options, feature_map=None):
    at_once = in_one_batch(q) and q.shape[2] > 1
    if start is None and not at_once:
        start = _empty_state(width, scaled, keys.v)
    if q.shape[2] == 1:
        return _step(q, rotated_query, keys, start, options)
    start = start and _constant_scale(start)
    logs = keys.log_weight if start is None else _log_weight(start, keys)
    if at_once:
        scaled = scaled if start is None else start.log_scale is not None
        if start is None and rotated_query is None and not (scaled or remember or options[1]):
            found = _by_fla(q, keys, width, options, feature_map)
            if found is not None:
                return found, None
        out, *end = BatchedCausalScan.apply(
            *(q, keys.k, rotated_query, keys.rotated, keys.v, keys.mask, logs, *(start or (None, None, None))),
            *(chunk_size, *options, width, scaled, remember, feature_map, keys.feature_map, *keys.params),
        )
        return out, LinearState(*(end if scaled else end[:2])) if remember else None
    if start.log_scale is not None and logs is not None:
        start = start._replace(log_scale=start.log_scale.to(torch.promote_types(start.log_scale.dtype, logs.dtype)))
    out, *end = CausalScan.apply(
        *(q, keys.k, rotated_query, keys.rotated, keys.v, keys.mask, logs, *start),
        *(chunk_size, *options, feature_map, keys.feature_map, *keys.params),
    )
    return out, LinearState(*end) if start.log_scale is not None else LinearState(*end[:2])


def _constant_scale(start: LinearState) -> LinearState:
    """The same state, of which the sums carry the gradient of the scale: the engines take that for a constant."""
    scale = start.log_scale
    if scale is None or not scale.requires_grad:
        return start
    factor = (scale - scale.detach()).exp().to(start.kv.dtype)
    return LinearState(start.kv * factor[..., None, None], start.z * factor[..., None], scale.detach())


def _by_fla(q, keys: _Keys, width: int, options, feature_map) -> Tensor | None:
    """A whole text by a kernel of flash-linear-attention, for which denominators are sums of values of 1."""
    eps, _, normalize = options
    columns = keys.v.shape[3]
    extra = 8 - columns % 8 if normalize else 0
    kernel = sums_kernel(width, keys.v, columns + extra, _unnormalized)
    if kernel is None:
        return None
    dtype, k, v = accumulation_dtype(keys.v.dtype), keys.k, keys.v
    with without_autocast(v):
        q = q if feature_map is None else feature_map(q.to(dtype), *keys.params)
        k = k if keys.feature_map is None else keys.feature_map(k.to(dtype), *keys.params)
        if extra:
            v = torch.cat([v, torch.eye(1, extra, dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)], dim=-1)
        out, _ = kernel(q, k, v, keys.mask)
        if not normalize:
            return out
        inverse = inverse_or_zero(guard(out[..., columns : columns + 1].to(dtype), eps, 0.0))
        return (out[..., :columns] * inverse).to(v.dtype)


def _unnormalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The causal sums of a text from its beginning."""
    others = 64, 0.0, 0.0, False, k.shape[3], False, False, None, None
    return BatchedCausalScan.apply(q, k, None, None, v, *[None] * 5, *others)[0]


def _pair(features) -> tuple[Tensor, Tensor | None]:
    return (features, None) if isinstance(features, Tensor) else (features[0], features[1])


def _step(phi_q, rotated_query, keys: _Keys, start: LinearState, options) -> tuple[Tensor, LinearState]:
    """One token, `[B, H, 1, *]`: it joins the state first and reads then, so it sees itself."""
    eps, minimum, normalize = options
    kv, z, scale = start
    dtype = kv.dtype
    with without_autocast(kv):
        k, v = keys.k.to(dtype), keys.v.to(dtype)
        keep = None if keys.mask is None else keys.mask[:, None, :, None]
        k, turned = masked(k, keep), None if keys.rotated is None else masked(keys.rotated.to(dtype), keep)
        logs = _log_weight(start, keys)
        if scale is not None and logs is not None:
            logs = logs.to(torch.promote_types(dtype, logs.dtype)).clamp(min=LOG_ZERO)
            logs = logs if keep is None else logs.masked_fill(~keep[..., 0], LOG_ZERO)
            before = scale[..., None]
            total = torch.maximum(before, logs.detach() if logs.requires_grad else logs)
            old, weight = (before - total).exp().to(dtype), (logs - total).exp().to(dtype)[..., None]
            k, turned = k * weight, None if turned is None else turned * weight
            # A new tensor anyhow, to which what the token writes is added in place.
            kv = (kv * old[..., None]).addcmul_((k if turned is None else turned).mT, v)
            z, scale = torch.addcmul(k[:, :, 0], z, old), total[..., 0]
        else:
            kv, z = torch.addcmul(kv, (k if turned is None else turned).mT, v), z + k[:, :, 0]
        q = phi_q.to(dtype)
        out = (q if rotated_query is None else rotated_query.to(dtype)) @ kv
        if normalize:
            denominator = guard((q * z[:, :, None]).sum(-1, keepdim=True), eps, minimum)
            out = out / denominator.masked_fill(vanishes(denominator), math.inf)
    return out.to(keys.v.dtype), LinearState(kv, z, scale)


def _add_keys(start: LinearState | None, keys: _Keys, width: int, scaled: bool) -> LinearState:
    logs = keys.log_weight if start is None else _log_weight(start, keys)
    scaled = scaled if start is None else start.log_scale is not None
    kv, z, scale = Write.apply(
        *(
            keys.k,
            keys.rotated,
            keys.v,
            keys.mask,
            None if logs is None else logs.to(accumulation_dtype(keys.v.dtype)),
        ),
        *(width, scaled, keys.feature_map, *keys.params),
    )
    if start is None:
        return LinearState(kv, z, scale if scaled else None)
    if start.log_scale is None:
        return LinearState(start.kv + kv, start.z + z)
    total = torch.maximum(start.log_scale, scale)
    old, new = (start.log_scale - total).exp().to(kv.dtype), (scale - total).exp().to(kv.dtype)
    kv = start.kv * old[..., None, None] + kv * new[..., None, None]
    return LinearState(kv, start.z * old[..., None] + z * new[..., None], total)


def _log_weight(start: LinearState, keys: _Keys) -> Tensor | None:
    """The weights given, or 0 where a weighted state meets keys without weights."""
    if keys.log_weight is None and keys.feature_map is None and start.log_scale is not None:
        return start.z.new_zeros(keys.k.shape[:3])
    return keys.log_weight


def _empty_state(width: int, scaled: bool, v: Tensor) -> LinearState:
    kv = torch.zeros(*v.shape[:2], width, v.shape[3], dtype=accumulation_dtype(v.dtype), device=v.device)
    z = torch.zeros_like(kv[..., 0])
    return LinearState(kv, z, torch.full_like(z[..., 0], LOG_ZERO) if scaled else None)


def _given_state(width: int, scaled: bool, v: Tensor, state: tuple | None) -> LinearState | None:
    if state is None:
        return None
    kv, z = state[:2]
    batch, heads, _, value_width = v.shape
    if kv.shape != (batch, heads, width, value_width) or z.shape != (batch, heads, width):
        raise ValueError(
            f"state holds {tuple(kv.shape)} and {tuple(z.shape)}, but these keys and values need "
            f"{(batch, heads, width, value_width)} and {(batch, heads, width)}."
        )
    scale = state[2] if len(state) > 2 else None
    if scale is None and scaled:
        scale = torch.zeros_like(z[..., 0])  # earlier keys had weight 1
    return LinearState(kv, z, scale)
