# SPDX-License-Identifier: Apache-2.0
"""Linear attention where every process holds a part of each text: states of parts, joined to those of texts.

What goes between processes is the state of a head, [F, d + 1] numbers, whatever the length. Log scales, which keep
exponentials in range, are brought to their maximum first; it carries no gradient, as it cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.text_parts import TextParts
from ...ops.linear.attention import LinearState
from ...ops.linear.kernels import LOG_ZERO


def state_of_all(own: LinearState, parts: TextParts) -> LinearState:
    """The state after this part's own keys -> after those of whole texts."""
    if own.log_scale is None:
        return _apart(parts.total(_together(own)), None)
    top = parts.largest(own.log_scale)
    return _apart(parts.total(_together(own) * _factor(own.log_scale, top, own)), top)


def state_before(own: LinearState, parts: TextParts) -> LinearState:
    """The state after this part's own keys -> after those of all earlier parts."""
    states = parts.all(_together(own))[: parts.rank]
    if own.log_scale is None:
        return _apart(states.sum(0), None)
    scales = parts.all(own.log_scale.detach())[: parts.rank]
    nothing = torch.full_like(own.log_scale, LOG_ZERO)
    top = torch.cat([nothing[None], scales]).amax(0)
    return _apart((states * _factor(scales, top, own)).sum(0), top)


def affine_state_before(own: Tensor, parts: TextParts) -> Tensor:
    """The state that earlier parts leave one after the other, from zero, each taking S to M S + U. own: [M | U] of
    this part, [B, H, F, F + d] -> [B, H, F, d]."""
    maps, width = parts.all(own)[: parts.rank], own.shape[2]
    state = torch.zeros_like(own[..., width:]) + maps[:0].sum(0)[..., width:]  # in every process's graph
    for each in maps:
        state = each[..., :width] @ state + each[..., width:]
    return state


def _together(state: LinearState) -> Tensor:
    return torch.cat([state.kv, state.z[..., None]], dim=-1)


def _apart(both: Tensor, scale: Tensor | None) -> LinearState:
    return LinearState(both[..., :-1].contiguous(), both[..., -1].contiguous(), scale)


def _factor(scale: Tensor, top: Tensor, state: LinearState) -> Tensor:
    return (scale.detach() - top).exp().to(state.kv.dtype)[..., None, None]
