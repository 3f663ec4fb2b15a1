# SPDX-License-Identifier: Apache-2.0
"""Separable convolutions over tokens, and a layer whose transition is made of two of them."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput, dropout_rate
from ..core.components import register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer, WindowSublayer, check_window_block


class SeparableConvolution(nn.Module):
    """y = (depthwise_k * x) W + b: a kernel for each channel, then a map of single tokens. The windows of the inputs
    [B, T + k - 1, C] -> [B, T, C']."""

    def __init__(self, width: int, output: int, kernel: int):
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width, bias=False)
        self.pointwise = nn.Linear(width, output)

    def initialize(self, config, init) -> None:
        reach = (6 / (2 * self.depthwise.kernel_size[0])) ** 0.5  # Glorot's for each channel
        init.uniform_(self.depthwise.weight, -reach, reach)

    @property
    def kernel(self) -> int:
        return self.depthwise.weight.shape[-1]

    def forward(self, windows: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(windows.transpose(1, 2)).transpose(1, 2))


class SeparableTransition(WindowSublayer):
    """y = sepconv_k2(relu(sepconv_k1(x))), with zeros beyond the text (Dehghani et al. 2019, section 2.1; the kernels
    are those of the released code). Kernels are centered in an encoder and end at their token in a decoder. Cost O(T D
    F). State: the last k1 - 1 inputs and the last k2 - 1 of the hidden ones.
    """

    dropout = dropout_rate("activation_dropout")

    def __init__(self, config, spec: SeparableConvolutionBlockSpec, layer_idx: int):
        super().__init__("transition", layer_idx)
        width, inner = config.hidden_size, config.intermediate_size
        self.first = SeparableConvolution(width, inner, spec.kernels[0])
        self.second = SeparableConvolution(inner, width, spec.kernels[1])
        self.dropout = config.activation_dropout_prob

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        windows = self.windows_of(hidden_states, self.first.kernel, context, past_key_values, step)
        inner = F.relu(self.first(windows))
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        windows = self.windows_of(inner, self.second.kernel, context, past_key_values, step, "transition_inner")
        return SublayerOutput(self.second(windows))


class SeparableConvolutionLayer(XFormerLayer):
    """Attention, cross-attention, separable convolutions."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "transition":
            return SeparableTransition(config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "separable_convolution", aliases=("sepconv",))
class SeparableConvolutionBlockSpec(BlockSpec):
    """A vanilla layer whose feed-forward is two separable convolutions over neighboring tokens, from `hidden_size` to
    `intermediate_size` channels and back, with a ReLU between: the Universal Transformer's other transition.

    kernels: tokens that they read.
    """

    mixes: ClassVar[str] = "its convolutions read a token's neighbors"

    summary = "separable convolutions in the place of the feed-forward"

    kernels: tuple[int, ...] = (3, 5)

    def check_fields(self) -> None:
        if len(self.kernels) != 2 or min(self.kernels) < 1:
            raise ValueError(
                f"block 'separable_convolution' needs two sizes of 1 or more under `kernels`, got {self.kernels}."
            )

    def check(self, config) -> None:
        even = [kernel for kernel in self.kernels if kernel % 2 == 0]
        if even and not config.is_decoder:
            raise ValueError(
                "block 'separable_convolution' centers its kernels in an encoder, which needs odd `kernels`, got"
                f" {even[0]}."
            )
        check_window_block("separable_convolution", config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        # Of type attention: it is given the cache.
        return [SublayerPlan("attention", "attention"), *reading, SublayerPlan("transition", "attention")]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> SeparableConvolutionLayer:
        return SeparableConvolutionLayer(config, self, **where)
