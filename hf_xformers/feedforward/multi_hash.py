# SPDX-License-Identifier: Apache-2.0
"""Experts in slices: several hashes put the network of a token together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import Experts, grouped_matmul


class MultiHashExperts(Experts):
    """v = act([B_{k_1}(x), ..., B_{k_N}(x)]), y = [C_{k_1}(v), ..., C_{k_N}(v)] (Roller et al. 2021, arXiv
    2106.04426, section 3.2): N hashes k of a token choose one of E weights each for N slices of both projections.

    up_proj [N E, F / N, D], down_proj [N E, D / N, F], expert e of slice m at m E + e: as many parameters and products
    as N = 1 has, and E^N different networks.
    """

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None = None) -> Tensor:
        """tokens [n, D]; chosen [n, N], 0 <= chosen <= num_experts (the last: nowhere) -> [n, D]."""
        count, slices = chosen.shape
        total = slices * self.num_experts
        first = torch.arange(slices, device=chosen.device)[:, None] * self.num_experts
        keys = torch.where(chosen.t() < self.num_experts, chosen.t() + first, total).reshape(-1)  # slice by slice
        ordered, order = torch.sort(keys, stable=True)
        ends = torch.searchsorted(ordered, torch.arange(total, device=keys.device), right=True).to(torch.int32)
        nowhere, ordered = (ordered == total).unsqueeze(-1), ordered.clamp(max=total - 1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)

        def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """[n, K], [N E, M, K] -> [n, N M]. Rows of nobody are masked at every step: products leave arbitrary
            numbers in them."""
            sliced = rows[order % count].masked_fill(nowhere, 0.0)
            sliced = grouped_matmul(sliced, weight.transpose(1, 2), ends)
            if bias is not None:
                sliced = sliced + bias.to(sliced.dtype)[ordered]
            sliced = sliced.masked_fill(nowhere, 0.0)
            return sliced[back].view(slices, count, -1).transpose(0, 1).flatten(1)

        up, down = self.weights(tokens.device.type)
        inner = self.activation(project(tokens.to(up.dtype), up, self.up_bias))
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        return project(inner, down, self.down_bias).to(tokens.dtype)
