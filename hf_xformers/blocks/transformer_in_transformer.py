# SPDX-License-Identifier: Apache-2.0
"""TNT's layer: a small Transformer over the pixels of every patch inside that over the patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ..core.call import Call, dropout_rate
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import States, one_state
from ..embedding.pixel_patch import PIXELS, PixelStates
from .base import BlockSpec, LayerOutput, SublayerPlan, XFormerLayer


class PixelLayer(nn.Module):
    """Y <- Y + MSA(LN(Y)), Y <- Y + MLP(LN(Y)), among the pixels of each patch alone."""

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config, heads: int, ratio: int):
        super().__init__()
        width = config.embedding.inner_width
        self.num_heads, self.dropout = heads, config.attention_probs_dropout_prob
        self.attention_norm = config.normalization.build(config, width=width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.feedforward_norm = config.normalization.build(config, width=width)
        self.up_proj, self.down_proj = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)
        self.activation = ACT2FN["gelu"]
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: Tensor) -> Tensor:
        """[R, m, c] -> [R, m, c]."""
        read = self.attention_norm(states)
        query, key, value = (
            project(read).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate).transpose(1, 2).flatten(2)
        states = states + self.hidden_dropout(self.o_proj(mixed))
        mapped = self.down_proj(self.activation(self.up_proj(self.feedforward_norm(states))))
        return states + self.hidden_dropout(mapped)


class TNTLayer(XFormerLayer):
    """Han et al. 2021 (arXiv 2103.00112), section 2.2. With Y_i the pixels of patch i and z_0 the class token:

    Y_i <- inner Transformer layer of Y_i
    z_i <- z_i + LN(W LN(vec(Y_i))) for the patches i = 1 .. N
    z   <- outer Transformer layer of z

    A patch's pixels reach other patches through z alone. Cost O(N m^2 c + N^2 D) besides projections.
    """

    def __init__(self, config, block: TransformerInTransformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, block, layer_idx=layer_idx, cross=cross)
        inner = config.embedding.inner_grid(config)
        count = inner[0] * inner[1] * config.embedding.inner_width
        self.leading = config.embedding.leading_tokens
        self.pixels = PixelLayer(config, block.inner_heads, block.inner_ratio)
        self.pixel_norm = config.normalization.build(config, width=count)
        self.join = nn.Linear(count, config.hidden_size, bias=False)
        self.patch_norm = config.normalization.build(config)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if PIXELS not in context.inputs:
            raise ValueError(
                "block 'transformer_in_transformer' reads the pixels of an image; give `pixel_values`, not"
                " `inputs_embeds` alone."
            )
        if context.state(PixelStates) is None:
            context.start(PixelStates(context.inputs[PIXELS]))

    def run(self, hidden_states: Tensor, memory: Tensor | None, states: States, **given: Any) -> LayerOutput:
        pixels = states[PixelStates, None].states
        pixels = self.pixels(pixels.flatten(0, 1)).view_as(pixels)
        told = self.patch_norm(self.join(self.pixel_norm(pixels.flatten(2))))
        leading = hidden_states[:, : self.leading]
        hidden_states = torch.cat([leading, hidden_states[:, self.leading :] + told], dim=1)
        return super().run(hidden_states, memory, {**states, **one_state(PixelStates(pixels))}, **given)


@register("block", "transformer_in_transformer")
class TransformerInTransformerSpec(BlockSpec):
    """inner_heads: of the attention among a patch's pixels. inner_ratio: width of their feed-forward, in widths of a
    pixel's vector."""

    supports = frozenset()
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "it works on pixels inside patches"}
    reads: ClassVar[frozenset[HandOver]] = frozenset({HandOver.PIXELS})
    summary = "a Transformer layer over the pixels of every patch before that over patches"

    inner_heads: int = bounded(4, least=1)
    inner_ratio: int = bounded(4, least=1)

    def check(self, config) -> None:
        if config.embedding.inner_width % self.inner_heads:
            raise ValueError(
                f"transformer_in_transformer's `inner_heads` {self.inner_heads} do not divide the `inner_width`"
                f" {config.embedding.inner_width} of embedding 'pixel_patch'; change one of them."
            )
        if config.stack.shares != "all":
            raise ValueError(
                f"block 'transformer_in_transformer' hands pixels from layer to layer, which stack"
                f" {config.stack.type!r} does not; use the stack 'plain'."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        return [SublayerPlan("attention", "attention"), SublayerPlan("feedforward", "feedforward")]

    def build(self, config, **where) -> TNTLayer:
        return TNTLayer(config, self, **where)
