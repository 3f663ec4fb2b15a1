# SPDX-License-Identifier: Apache-2.0
"""Conditional positional encoding: a depthwise convolution tells tokens where they stand."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, check_layers, register
from ..normalization.residual import PlainSum
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer, WindowSublayer, check_window_block


class PositionGenerator(WindowSublayer):
    """DWConv_k(x), depthwise, with bias and zeros beyond the borders, which are what tells where they are (Chu et al.
    2021, arXiv 2102.10882, section 3.3).

    Text: in one dimension; in a decoder the kernel reads the last k tokens. Images: tokens in rows of a grid, in an
    encoder; tokens before the grid (class tokens) pass by. Cost O(T D k) or O(T D k^2). State: the last k - 1 inputs.
    """

    def __init__(self, config, spec: CPEBlockSpec, layer_idx: int):
        super().__init__("peg", layer_idx)
        self.kernel, self.grid, self.is_causal = spec.kernel, spec.grid_size, config.is_decoder
        self.circular = spec.border == "circular"
        width = config.hidden_size
        size = (width, 1, spec.kernel, spec.kernel) if spec.grid_size else (width, 1, spec.kernel)
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(width))

    def initialize(self, config, init) -> None:
        reach = self.weight[0].numel() ** -0.5  # PyTorch's start of a convolution
        init.uniform_(self.weight, -reach, reach)
        init.uniform_(self.bias, -reach, reach)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        width = hidden_states.shape[-1]
        if self.grid is not None:
            return SublayerOutput(self._image(self.real_inputs(hidden_states, context)))
        if self.is_causal:
            states = self.with_past(hidden_states, self.kernel - 1, context, past_key_values, step).transpose(1, 2)
        else:
            states = self._border(self.real_inputs(hidden_states, context).transpose(1, 2), 1)
        return SublayerOutput(F.conv1d(states, self.weight, self.bias, groups=width).transpose(1, 2))

    def _border(self, states: Tensor, dims: int) -> Tensor:
        reach = (self.kernel // 2,) * (2 * dims)
        return F.pad(states, reach, mode="circular") if self.circular else F.pad(states, reach)

    def _image(self, states: Tensor) -> Tensor:
        rows, columns = self.grid or (0, 0)
        extra = states.shape[1] - rows * columns
        if extra < 0:
            raise ValueError(
                f"block 'cpe' expects a grid of {rows} x {columns} tokens (`grid_size`), got {states.shape[1]} tokens."
            )
        grid = states[:, extra:].transpose(1, 2).unflatten(-1, (rows, columns))
        output = F.conv2d(self._border(grid, 2), self.weight, self.bias, groups=states.shape[-1])
        return F.pad(output.flatten(2).transpose(1, 2), (0, 0, extra, 0))


class CPELayer(XFormerLayer):
    """A vanilla layer, in some layers with a position generator after it."""

    def __init__(self, config, block: CPEBlockSpec, **where):
        super().__init__(config, block, **where)
        if any(entry.name == "peg" for entry in self.plan):
            self.peg_residual = PlainSum(config)

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "peg":
            return PositionGenerator(config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "cpe", aliases=("peg",))
class CPEBlockSpec(BlockSpec):
    """x <- x + DWConv_k(x) after some layers.

    Args:
        layers: after which (the paper: the first).
        kernel: odd width k >= 3.
        grid_size: rows and columns of an image's tokens (`None`: text).
        border: `zeros`, or `circular`, which tells no position (for images that wrap around).
    """

    mixes: ClassVar[str] = "its convolution reads a token's neighbors"

    summary = "a depthwise convolution over neighbors after the first layer gives positions"

    kernel: int = 3
    layers: tuple[int, ...] = bounded((0,), least=0)
    grid_size: tuple[int, ...] | None = None
    border: Literal["zeros", "circular"] = "zeros"

    def check_fields(self) -> None:
        if self.kernel < 3 or self.kernel % 2 == 0:
            raise ValueError(f"block 'cpe' needs an odd `kernel` >= 3, got {self.kernel}.")
        if self.grid_size is not None and (len(self.grid_size) != 2 or min(self.grid_size) < 1):
            raise ValueError(f"block 'cpe' takes (rows, columns) under `grid_size`, got {self.grid_size}.")
        if self.border == "circular" and self.grid_size is None:
            raise ValueError(
                "block 'cpe' has circular borders on images alone; set `grid_size` or use border 'zeros'."
            )

    def check(self, config) -> None:
        check_layers(self, config)
        if self.grid_size is not None and config.is_decoder:
            raise ValueError("block 'cpe' with `grid_size` reads whole images and cannot stand in a decoder.")
        check_window_block("cpe", config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        # Of type attention: it is given the cache.
        generator = [SublayerPlan("peg", "attention")] if layer_idx in self.layers else []
        return [
            SublayerPlan("attention", "attention"),
            *reading,
            SublayerPlan("feedforward", "feedforward"),
            *generator,
        ]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> CPELayer:
        return CPELayer(config, self, **where)
