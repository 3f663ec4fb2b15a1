# SPDX-License-Identifier: Apache-2.0
"""Conformer layers: attention and a convolution between two half feed-forward steps."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import register
from ..core.initialization import start_projections
from ..core.reading_weights import weight_of
from ..normalization.base import norm_inputs
from ..normalization.real_batch_norm import RealBatchNorm
from ..normalization.residual import Residual
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer, WindowSublayer, check_window_block


class ConformerConvolution(WindowSublayer):
    """y = swish(norm(w * (x W_1 . sigmoid(x W_g)))) W_2 (Gulati et al. 2020, arXiv 2005.08100, section 2.2, figure 2).

    w * z is a depthwise convolution, conv_t = sum_j w_j z_(t + j - p) for each channel by itself: around its token in
    an encoder, p = (k - 1) / 2, ending there in a decoder, p = k - 1. Zeros stand at padding and beyond the text. Cost
    O(T k D) and that of the projections. State: the last k - 1 of z.
    """

    def __init__(self, config, spec: ConformerBlockSpec, layer_idx: int):
        super().__init__("convolution", layer_idx)
        width = config.hidden_size
        self.kernel = spec.conv_kernel
        self.up_proj = nn.Linear(width, width, bias=spec.bias)
        self.gate_proj = nn.Linear(width, width, bias=spec.bias)
        self.depthwise = nn.Conv1d(width, width, spec.conv_kernel, groups=width, bias=spec.bias)
        in_batch = spec.conv_norm == "batch"
        eps = config.layer_norm_eps
        self.norm: nn.Module = RealBatchNorm(width, eps) if in_batch else nn.LayerNorm(width, eps=eps)
        self.down_proj = nn.Linear(width, width, bias=spec.bias)
        self.in_batch = in_batch

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=[self.up_proj, self.gate_proj], output=self.down_proj)
        # A mean of the kernel's tokens with random weights: as large as what it reads.
        init.normal_(self.depthwise.weight, mean=0.0, std=self.kernel**-0.5)
        if self.depthwise.bias is not None:
            init.zeros_(self.depthwise.bias)

    def convolved(self, states: Tensor, literal: bool) -> Tensor:
        """Windows' inputs [B, T + k - 1, D] -> [B, T, D]."""
        if not literal:
            return self.depthwise(states.transpose(1, 2)).transpose(1, 2)
        windows = states.unfold(1, self.kernel, 1)  # [B, T, D, k]
        found = (windows * weight_of(self.depthwise)[:, 0]).sum(-1)
        return found if self.depthwise.bias is None else found + weight_of(self.depthwise, "bias")

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        inner = self.up_proj(hidden_states) * torch.sigmoid(self.gate_proj(hidden_states))
        # Padding is made zero here and not before, or the bias of the projections would stand at it.
        states = self.windows_of(inner, self.kernel, context, past_key_values, step)
        mixed = self.convolved(states, context.implementation == "eager" or context.output_attentions)
        normal = self.norm(mixed, context.query_padding_mask) if self.in_batch else self.norm(mixed)
        return SublayerOutput(self.down_proj(nn.functional.silu(normal)))


class ClosedResidual(nn.Module):
    """The frame of a layer's last sublayer: y = LN(leave(x, f(enter(x)))), whatever the frame within."""

    def __init__(self, config, frame: Residual):
        super().__init__()
        self.normalization, self.frame = config.normalization, frame
        self.norm = config.normalization.build(config)

    def inputs(self, context: Call) -> dict[str, Any]:
        return {**self.frame.inputs(context), **norm_inputs(self.normalization, context)}

    def enter(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        return self.frame.enter(hidden_states, **inputs)

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return self.norm(self.frame.leave(hidden_states, output, gate, **inputs), **inputs)


class ConformerLayer(XFormerLayer):
    """The planned sublayers, and a norm of what they leave."""

    def __init__(self, config, block: ConformerBlockSpec, **where):
        super().__init__(config, block, **where)
        last = f"{self.plan[-1].name}_residual"
        self.add_module(last, ClosedResidual(config, self.get_submodule(last)))  # type: ignore[arg-type]

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "convolution":
            return ConformerConvolution(config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "conformer")
class ConformerBlockSpec(BlockSpec):
    """x += s FF1(x); x += SA(x); [x += XA(x)]; x += Conv(x); x += s FF2(x); x = LN(x) (Gulati et al. 2020, arXiv
    2005.08100, section 2.4, eq. 1), each with the config's residual.

    Args:
        conv_kernel: tokens that a convolution reads, odd (the paper's 32 of code that pads on one side is 31
            elsewhere).
        ffn_scale: s.
        conv_norm: of the convolution, over the real tokens of the batch (`batch`, which in training lets tokens see
            all others, so not in a decoder) or over a token's channels (`layer`).
        bias: of its maps.
    """

    additive: ClassVar[bool] = False
    tensor_parallel = False  # the sums of `conv_norm` over processes are those of data parallelism
    mixes: ClassVar[str] = "its convolution reads a token's neighbors"

    summary = "attention, then convolution, between two half feed-forwards"

    conv_kernel: int = 31
    ffn_scale: float | int = 0.5
    conv_norm: Literal["batch", "layer"] = "batch"
    bias: bool = True

    def check_fields(self) -> None:
        if self.conv_kernel < 1 or self.conv_kernel % 2 == 0:
            raise ValueError(
                f"block 'conformer' centers its kernel on a token, which needs an odd `conv_kernel`, got"
                f" {self.conv_kernel}; take {max(self.conv_kernel - 1, 1)} or {max(self.conv_kernel, 0) + 1}."
            )

    def check(self, config) -> None:
        if config.is_decoder and self.conv_norm == "batch":
            raise ValueError(
                "block 'conformer' with `conv_norm` 'batch' takes its statistics over all tokens, which in a decoder"
                " would show later ones; set `conv_norm` to 'layer' there."
            )
        check_window_block("conformer", config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        first, second = (
            SublayerPlan(name, "feedforward", residual_scale=self.ffn_scale)
            for name in ("feedforward", "feedforward_2")
        )
        # Of type attention: it is given the cache.
        convolution = SublayerPlan("convolution", "attention")
        return [first, SublayerPlan("attention", "attention"), *reading, convolution, second]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> ConformerLayer:
        return ConformerLayer(config, self, **where)
