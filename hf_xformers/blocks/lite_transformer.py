# SPDX-License-Identifier: Apache-2.0
"""Lite Transformer: long-short range attention, attention on one half of the channels and convolution on the other."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput
from ..core.components import bounded, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .narrow import check_reshaped, reshaped
from .token_convolution import TokenConvolution, TokenConvolutionForm
from .window_state import WindowCacheLayer, check_window_block

# Tokens that the convolutions of the layers reach, from the first one on; deeper layers have the last (released code).
KERNELS = (3, 7, 15, 31)


class LongShortRangeAttention(Sublayer):
    """y = [attention(x_a) | convolution(x_c)] for x = [x_a | x_c] (Wu, Liu, Lin, Lin and Han 2020, arXiv 2004.11886,
    section 4.2).

    Each branch sees its own channels alone and has projections of their width. Cost: T^2 C_a of attention and T k C_c
    of convolution. State: keys and values of C_a channels, and the last k - 1 inputs of the convolution.
    """

    def __init__(self, config, spec: LiteTransformerBlockSpec, layer_idx: int):
        super().__init__()
        self.attention_width = spec.attention_width(config)
        self.attention = config.attention.build(spec.attention_part(config), layer_idx=layer_idx)
        self.convolution = TokenConvolution(
            "convolution",
            config.hidden_size - self.attention_width,
            TokenConvolutionForm(
                spec.kernel(layer_idx),
                spec.heads_of_convolution(config),
                dynamic=spec.conv_type == "dynamic",
                glu=spec.conv_glu,
                softmax=spec.conv_weight_softmax,
                dropout=spec.weight_dropout,
            ),
            layer_idx,
        )

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        self.attention.prepare(context, past_key_values)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        sizes = [self.attention_width, hidden_states.shape[-1] - self.attention_width]
        far, near = hidden_states.split(sizes, dim=-1)
        given = {"past_key_values": past_key_values, "step": step}
        attended = self.attention(far, context, **given)
        convolved = self.convolution(near, context, **given)
        return attended._replace(output=torch.cat((attended.output, convolved.output), dim=-1))


class LiteTransformerLayer(XFormerLayer):
    """Long-short range attention, cross-attention, feed-forward."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "long_short_range":
            return LongShortRangeAttention(config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "lite_transformer", aliases=("lite", "lsra"))
class LiteTransformerBlockSpec(BlockSpec):
    """Self-attention on some channels next to a convolution on the others; the rest of the layer is vanilla. Its
    feed-forward is meant to be flat (`intermediate_size` = `hidden_size`).

    Args:
        attn_channels: channels of attention (`None`: half of them), which its `num_attention_heads` share.
        conv_heads: groups of the other channels that share a kernel (`None`: as many as attention has heads).
        kernel_sizes: tokens that the convolution of each layer reads, from the first one on, the last for all that
            follow (`None`: 3, 7, 15, 31, 31, ...).
        conv_type: kernels that each token makes (`dynamic`), or learned ones (`lightweight`).
        conv_glu: whether the convolution's input is gated.
        conv_weight_softmax: whether kernels are normalized.
        weight_dropout: probability with which a number of a kernel is left out.
    """

    passes_states: ClassVar[bool] = False
    mixes: ClassVar[str] = "its convolution reads a token's neighbors"

    summary = "attention on half of the channels, convolution on the others"

    attn_channels: int | None = None
    conv_heads: int | None = bounded(None, least=1)
    kernel_sizes: tuple[int, ...] | None = bounded(None, least=1)
    conv_type: Literal["dynamic", "lightweight"] = "dynamic"
    conv_glu: bool = True
    conv_weight_softmax: bool = True
    weight_dropout: float | int = bounded(0.0, least=0, below=1)

    def attention_width(self, config) -> int:
        return config.hidden_size // 2 if self.attn_channels is None else self.attn_channels

    def attention_part(self, config):
        """The layer's config as its attention sees it."""
        return reshaped(config, width=self.attention_width(config))

    def heads_of_convolution(self, config) -> int:
        return config.num_attention_heads if self.conv_heads is None else self.conv_heads

    def kernel(self, layer_idx: int) -> int:
        kernels = KERNELS if self.kernel_sizes is None else self.kernel_sizes
        return kernels[min(layer_idx, len(kernels) - 1)]

    def check(self, config) -> None:
        width, heads = self.attention_width(config), self.heads_of_convolution(config)
        if not 1 <= width < config.hidden_size:
            raise ValueError(
                f"block 'lite_transformer' divides `hidden_size` {config.hidden_size} between attention and"
                f" convolution, got `attn_channels` {width}; leave channels for both."
            )
        if (config.hidden_size - width) % heads:
            raise ValueError(
                f"block 'lite_transformer' has {config.hidden_size - width} channels in its convolution, which"
                f" {heads} `conv_heads` cannot share evenly; change one of them."
            )
        even = [size for size in self.kernel_sizes or () if size % 2 == 0]
        if even and not config.is_decoder:
            raise ValueError(
                f"block 'lite_transformer' centers its kernels in an encoder, which needs odd `kernel_sizes`, got"
                f" {even[0]}."
            )
        check_window_block("lite_transformer", config)
        check_reshaped("lite_transformer", config, self.attention_part(config))

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [
            SublayerPlan("long_short_range", "attention"),
            *reading,
            SublayerPlan("feedforward", "feedforward"),
        ]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> LiteTransformerLayer:
        return LiteTransformerLayer(config, self, **where)
