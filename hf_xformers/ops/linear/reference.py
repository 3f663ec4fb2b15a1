# SPDX-License-Identifier: Apache-2.0
"""Attention through feature maps as the equations say it: over all pairs, or token by token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .feature_maps import elu_plus_one


def linear_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    log_weight: Tensor | None = None,
    rotated_query: Tensor | None = None,
    rotated_key: Tensor | None = None,
    eps: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """The equation written out over all pairs, `O(T S)`; arguments as in [`linear_attention`]."""
    visible = query.new_ones(query.shape[2], key.shape[2])
    if causal:
        visible = visible.tril()
    if key_padding_mask is not None:
        visible = visible * key_padding_mask[:, None, None, :]
    if log_weight is not None:
        visible = visible * (log_weight - log_weight.amax(-1, keepdim=True)).exp()[:, :, None, :]
    denominator = ((query @ key.mT) * visible).sum(-1, keepdim=True) + eps
    rows = query if rotated_query is None else rotated_query
    columns = key if rotated_key is None else rotated_key
    numerator = ((rows @ columns.mT) * visible) @ value
    if not normalize:
        return numerator
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))


def folded_attention_reference(
    query: Tensor,
    key: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_weight: Tensor,
    output_bias: Tensor | None,
    *,
    key_padding_mask: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What [`read_folded_sums`] reads of [`folded_sums`], with the values of all tokens and the outputs of all heads;
    query `[B, H, T, F]` -> `[B, T, D]`."""
    value = F.linear(states, weight, bias).unflatten(-1, (key.shape[1], -1)).transpose(1, 2)
    features = (elu_plus_one(query), elu_plus_one(key))
    found = linear_attention_reference(*features, value, causal=False, key_padding_mask=key_padding_mask, eps=eps)
    return F.linear(found.transpose(1, 2).flatten(2), output_weight, output_bias)


def delta_rule_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token, on features; returns the outputs and the last state."""
    outputs = []
    state = query.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]) if state is None else state
    for t in range(key.shape[2]):
        strength = beta[:, :, t, None]
        if key_padding_mask is not None:
            strength = strength * key_padding_mask[:, None, t, None]
        found = torch.einsum("bhf,bhfv->bhv", key[:, :, t], state)
        state = state + torch.einsum("bhf,bhv->bhfv", key[:, :, t], strength * (value[:, :, t] - found))
        outputs.append(torch.einsum("bhf,bhfv->bhv", query[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def gated_recurrence_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    beta: Tensor | None = None,
    read: Tensor | None = None,
    write: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[`decayed_scan`], with `beta` [`gated_delta_rule`] or, with `read` and `write`, [`low_rank_delta_rule`], token
    by token; the outputs and the last state."""
    shared = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(shared, dim=1), key.repeat_interleave(shared, dim=1)
    log_decay = log_decay[..., None] if log_decay.dim() == 3 else log_decay
    state = value.new_zeros(*value.shape[:2], key.shape[3], value.shape[3]) if state is None else state
    outputs = []
    for t in range(key.shape[2]):
        if segment_ids is not None and t > 0:
            goes_on = segment_ids[:, t] == segment_ids[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, 0.0)
        after = log_decay[:, :, t, :, None].exp() * state
        new = value[:, :, t]
        if beta is not None:
            new = beta[:, :, t, None] * (new - torch.einsum("bhf,bhfv->bhv", key[:, :, t], after))
        if read is not None and write is not None:
            held = torch.einsum("bhf,bhfv->bhv", read[:, :, t], after)
            after = after - torch.einsum("bhf,bhv->bhfv", write[:, :, t], held)
        after = after + torch.einsum("bhf,bhv->bhfv", key[:, :, t], new)
        state = (
            after if key_padding_mask is None else torch.where(key_padding_mask[:, None, t, None, None], after, state)
        )
        outputs.append(torch.einsum("bhf,bhfv->bhv", query[:, :, t], state))
    return torch.stack(outputs, dim=2), state
