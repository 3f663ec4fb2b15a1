# SPDX-License-Identifier: Apache-2.0
"""Short sequences made of windows over tokens: where the windows of padded rows are, and how they are pooled.

Tokens are counted from a row's first real one: token t belongs to group t // stride, and window p holds the `kernel`
tokens from p * stride on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.products import wide_products


class Grouped:
    """Queries and keys of a call, by group: `before` groups of earlier tokens, then the groups of the queries.

    lead: [B] padding in front of each row's first token, or None (no row has any). queries, keys: their numbers; the
    keys are the last ones of a text of `total` tokens, and the queries the last ones of the keys.
    """

    def __init__(self, lead: Tensor | None, queries: int, keys: int, total: int, stride: int, device: torch.device):
        self.queries, self.keys, self.stride = queries, keys, stride
        first, base = total - queries, total - keys  # slots of the first query and the first key
        self.aligned = lead is None and keys == queries == total
        zero = torch.zeros(1, dtype=torch.long, device=device)
        self.lead = (zero if lead is None else lead)[:, None]
        if first == 0:  # every row from its first token on
            self.start, self.before = torch.zeros_like(self.lead), 0
            self.groups = -(-queries // stride)
        else:
            self.start = torch.div(first - self.lead, stride, rounding_mode="floor")
            self.before = (first - base) // stride
            inside = first % stride if lead is None else stride - 1  # tokens of the first query's group before it
            self.groups = -(-(queries + inside) // stride)
        self.first, self.base = first, base

    def _take(self, x: Tensor, index: Tensor) -> Tensor:
        """x [B, H, n, d], index [B or 1, m] -> [B, H, m, d]."""
        index = index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])
        return x.gather(2, index)

    def group_queries(self, x: Tensor) -> Tensor:
        """[B, H, T, d] -> [B, H * stride, groups, d]: neighboring heads have the 1st, 2nd, ... token of each
        group."""
        if self.aligned:
            x = F.pad(x, (0, 0, 0, self.groups * self.stride - self.queries))
        else:
            place = torch.arange(self.groups * self.stride, device=x.device) + self.start * self.stride
            x = self._take(x, (place + self.lead - self.first).clamp(0, self.queries - 1))
        return x.unflatten(2, (self.groups, self.stride)).transpose(2, 3).flatten(1, 2)

    def ungroup(self, x: Tensor) -> Tensor:
        """[B, H * stride, groups, d] -> [B, H, T, d], zeros before a row's first token."""
        x = x.unflatten(1, (-1, self.stride)).transpose(2, 3).flatten(2, 3)
        if self.aligned:
            return x[:, :, : self.queries]
        place = torch.arange(self.queries, device=x.device) + self.first - self.lead
        taken = self._take(x, (place - self.start * self.stride).clamp(0, x.shape[2] - 1))
        return torch.where((place >= 0)[:, None, :, None], taken, 0.0)

    def windows(self, x: Tensor, real: Tensor | None, kernel: int) -> tuple[Tensor, Tensor]:
        """x [B, H, S, d] and its mask [B, S] (None: all are real) -> the tokens of all windows that begin in the
        groups, in order and as far as they are known (the others zero), [B, H, n, d], and which of them are real,
        [B or 1, n]; n = (windows - 1) * stride + kernel."""
        count = (self.before + self.groups - 1) * self.stride + kernel
        if self.aligned:
            known = torch.arange(count, device=x.device)[None] < self.keys
            return F.pad(x, (0, 0, 0, max(count - self.keys, 0)))[:, :, :count], known
        place = torch.arange(count, device=x.device) + (self.start - self.before) * self.stride
        index = place + self.lead - self.base
        known = (place >= 0) & (index >= 0) & (index < self.keys)
        index = index.clamp(0, self.keys - 1)
        if real is not None:
            known = known.expand(real.shape[0], -1) & real.gather(1, index.expand(real.shape[0], -1))
        return torch.where(known[:, None, :, None], self._take(x, index), 0.0), known

    def begun(self) -> Tensor:
        """Which windows begin in the text, [B or 1, windows]; one before it may reach into it."""
        count = torch.arange(self.before + self.groups, device=self.lead.device)
        return count + self.start - self.before >= 0


def pool_windows(
    x: Tensor, real: Tensor, kernel: int, stride: int, kind: str, centre: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Windows of `kernel` tokens at every `stride`-th one, each made one vector of its real tokens.

    x: [B, H, n, d], zero where `real` [B or 1, n] is False. kind: `mean`; `max`; or `ldconv`, a sum with the weights
    softmax(W c) of the vector c in the middle of the window, W = `centre` [H, kernel, d].

    Returns:
        [B, H, P, d], zero for windows without a real token, and which have one, [B or 1, P].
    """
    count = (x.shape[2] - kernel) // stride + 1
    last = (count - 1) * stride + 1
    known = torch.stack([real[:, t : t + last : stride] for t in range(kernel)], -1)  # [B or 1, P, kernel]
    some = known.any(-1)
    if kind == "max":
        windows = x.unfold(2, kernel, stride)
        found = windows.masked_fill(~known[:, None, :, None], torch.finfo(x.dtype).min).amax(-1)
        return torch.where(some[:, None, :, None], found, 0.0), some
    wide = torch.promote_types(x.dtype, torch.float32)
    if kind == "mean" or centre is None:
        weights = known.to(wide)[:, None] / known.sum(-1).clamp(min=1).to(wide)[:, None, :, None]
    else:
        middle = (kernel - 1) // 2
        scores = wide_products(x[:, :, middle : middle + last : stride], centre)
        scores = scores.masked_fill(~known[:, None], torch.finfo(wide).min)
        weights = scores.softmax(-1).masked_fill(~known[:, None], 0.0)
    total = sum(weights[..., t, None] * x[:, :, t : t + last : stride] for t in range(kernel))
    return torch.as_tensor(total).to(x.dtype), some
