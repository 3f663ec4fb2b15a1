# SPDX-License-Identifier: Apache-2.0
"""One vector for a text."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..ops.common.real_tokens import first_real, last_real
from .prepared import State


def pool(hidden_states: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """One vector per row: the `first`, the `mean` or the `last` real token. [B, T, D], mask [B, T] or None -> [B,
    D]."""
    if mask is None:
        if how == "mean":
            return hidden_states.mean(dim=1)
        return hidden_states[:, 0 if how == "first" else -1]
    mask = mask.to(hidden_states.device)
    if how == "mean":
        weights = mask.to(hidden_states.dtype).unsqueeze(-1)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)  # sums of many numbers
        total, count = (numbers.sum(dim=1, dtype=wide) for numbers in (hidden_states * weights, weights))
        return (total / count.clamp(min=1)).to(hidden_states.dtype)
    # In a row of padding alone, its first slot.
    index = first_real(mask.bool()) if how == "first" else last_real(mask.bool())
    return hidden_states[torch.arange(hidden_states.shape[0], device=mask.device), index]


def fitting(mask: Tensor | None, states: Tensor, own: Tensor | None = None) -> Tensor | None:
    """The mask of states [B, T, D]: that of their text, if it has as many entries, else their `own`, or what it says
    of the last tokens, where others are cached before them."""
    if mask is None or mask.shape == states.shape[:2]:
        return mask
    cached = own is None and mask.ndim == 2 and mask.shape[1] > states.shape[1]
    return mask[:, -states.shape[1] :] if cached else own


class TextPooler(nn.Module):
    """Base of what makes a text's vector: `forward(hidden_states [B, T, D], padding_mask [B, T] or None)`.

    inputs: model inputs that it is given besides these by name; state: what of the last layer it is given as `state`
    (None where a stack passes nothing on).
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[type[State] | None] = None


@runtime_checkable
class MakesTextVector(Protocol):
    """A stack, or an attention under a stack that says nothing, with a pooler of its own."""

    def build_pooler(self, config: Any) -> TextPooler | None:
        """What makes a text's vector of the last states in place of the usual pooler, called with `(hidden_states [B,
        T, D], padding_mask)` and what its class names; None: the usual one."""


class Pooler(TextPooler):
    """tanh(W h_0 + b) of the first real token (Devlin et al. 2019), in a decoder of the last, which alone has read the
    whole text; the config may choose another activation."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.stack.output_width(config), config.hidden_size)
        self.activation = ACT2FN[config.pooler_activation]
        self.token = "last" if config.is_decoder else "first"

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[B, T, D], padding_mask [B, T] boolean or None (nothing is padded) -> [B, D]."""
        return self.activation(self.dense(pool(hidden_states, padding_mask, self.token)))
