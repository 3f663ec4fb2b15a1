# SPDX-License-Identifier: Apache-2.0
"""Padding removal: between attentions a batch is one row of its real tokens, so that padding costs nothing there.

Effective Transformer (ByteDance 2020) and NVIDIA's FasterTransformer 2.1 gather the real tokens before the first layer
and lay them out in rows again around attention only. Here likewise: projections, feed-forward layers, norms and
residual sums run on `[1, N, D]`, N real tokens; attention itself, of whatever mechanism, on `[B, H, T, d]` with zeros
for padding.
"""

from __future__ import annotations

from torch import Tensor


class Unpadding:
    """Where the real tokens of a batch are. mask: [B, T] boolean, True = real.

    Finding them waits for the device once per call; the number N of real tokens decides the shapes.
    """

    def __init__(self, mask: Tensor):
        self.rows, self.length = mask.shape
        self.index = mask.flatten().nonzero().squeeze(1)

    def pack(self, padded: Tensor) -> Tensor:
        """[B or 1, T, ...] -> [1, N, ...]: the real tokens, row after row."""
        if padded.shape[0] != self.rows:
            padded = padded.expand(self.rows, *padded.shape[1:])
        return padded.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def pad(self, packed: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...] with zeros where padding is."""
        space = packed.new_zeros(self.rows * self.length, *packed.shape[2:])
        return space.index_copy(0, self.index, packed.squeeze(0)).unflatten(0, (self.rows, self.length))
