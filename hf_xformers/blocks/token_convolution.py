# SPDX-License-Identifier: Apache-2.0
"""Lightweight and dynamic convolution between two projections, as branches of layers have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..ops.common.segments import accumulation_dtype
from ..ops.convolution.convolution import token_convolution, token_convolution_reference
from .window_state import WindowSublayer


@dataclass(frozen=True)
class TokenConvolutionForm:
    """
    Args:
        kernel: tokens k.
        heads: groups of channels with a kernel each.
        dynamic: whether each token makes its kernels, or they are parameters.
        glu: whether the first projection is gated.
        softmax: whether kernels are normalized.
        dropout: on their numbers.
    """

    kernel: int
    heads: int
    dynamic: bool = True
    glu: bool = True
    softmax: bool = True
    dropout: float = 0.0


class TokenConvolution(WindowSublayer):
    """y = conv(z) W_2, z = (x W_1) * sigmoid(x W_g) or, without a gate, x W_1; zeros stand beyond the text.

    conv_t = sum_j w_tj z_(t + j - p), p = k - 1 in a decoder and (k - 1) / 2 in an encoder. The kernels w are
    softmax_j(z_t W_k) for each token and head (dynamic), or softmax_j of learned numbers (lightweight): Wu et al.
    2019 (arXiv 1901.10430), sections 3 and 4. Taps beyond the text keep their share of the softmax. Time O(T k C) and
    that of the projections. State: the last k - 1 of z.
    """

    def __init__(self, name: str, width: int, form: TokenConvolutionForm, layer_idx: int, bias: bool = True):
        super().__init__(name, layer_idx)
        self.form = form
        self.up_proj = nn.Linear(width, width, bias=bias)
        self.gate_proj = nn.Linear(width, width, bias=bias) if form.glu else None
        self.kernel_proj: nn.Linear | None = None
        self.kernel: nn.Parameter | None = None
        if form.dynamic:
            self.kernel_proj = nn.Linear(width, form.heads * form.kernel, bias=False)
        else:
            self.kernel = nn.Parameter(torch.empty(form.heads, form.kernel))
        self.down_proj = nn.Linear(width, width, bias=bias)

    def initialize(self, config, init) -> None:
        if self.kernel is not None:
            reach = (6 / sum(self.kernel.shape)) ** 0.5  # Glorot's, as the released code has it
            init.uniform_(self.kernel, -reach, reach)

    def kernels(self, inner: Tensor) -> Tensor:
        """inner [B, T, C] -> [B, T, G, k] or [G, k], in float32 at least"""
        form = self.form
        if self.kernel_proj is None:
            numbers = cast(Tensor, self.kernel)
        else:
            numbers = self.kernel_proj(inner).unflatten(-1, (form.heads, form.kernel))
        numbers = numbers.to(accumulation_dtype(numbers.dtype))
        weights = torch.softmax(numbers, dim=-1) if form.softmax else numbers
        return F.dropout(weights, form.dropout, self.training) if form.dropout else weights

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        inner = self.up_proj(hidden_states)
        if self.gate_proj is not None:
            inner = inner * torch.sigmoid(self.gate_proj(hidden_states))
        # Padding is made zero here and not before, or the bias of the projection would stand at it.
        states = self.windows_of(inner, self.form.kernel, context, past_key_values, step)
        literal = context.implementation == "eager" or context.output_attentions
        convolve = token_convolution_reference if literal else token_convolution
        kernels = self.kernels(inner)
        if literal:
            kernels = kernels.expand(*inner.shape[:2], -1, -1)
        return SublayerOutput(self.down_proj(convolve(states, kernels)))
