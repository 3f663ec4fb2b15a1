"""One vector for a text."""

from __future__ import annotations

import torch
from torch import Tensor


def pool(hidden_states: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """One vector per row: the `first`, the `mean` or the `last` real token. [B, T, D], mask [B, T] or None -> [B, D]."""
    if mask is None:
        if how == "mean":
            return hidden_states.mean(dim=1)
        return hidden_states[:, 0 if how == "first" else -1]
    mask = mask.to(hidden_states.device)
    if how == "mean":
        weights = mask.to(hidden_states.dtype).unsqueeze(-1)
        return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    order = torch.arange(mask.shape[1], device=mask.device)
    real = mask.bool()
    # In a row of padding alone, its first slot.
    index = real.long().argmax(-1) if how == "first" else torch.where(real, order, 0).amax(-1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=mask.device), index]
