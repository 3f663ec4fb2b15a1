# SPDX-License-Identifier: Apache-2.0
"""RWKV-7's layer: attention, and a feed-forward that reads the token before as well."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.call import Call, Sublayer, SublayerOutput, self_attention_cache
from ..core.components import register
from ..core.initialization import start_projections
from ..core.weight_decay import Undecayed
from ..ops.convolution.short import token_before
from .base import BlockSpec, SublayerPlan, XFormerLayer

WINDOW = "token_before"  # under which a cache has the last input


class ChannelMixing(Undecayed, Sublayer):
    """y_t = W_down max(0, W_up (x_t + (x_{t-1} - x_t) m))^2, x [B, T, D] -> [B, T, D], m [D] learned.

    Peng et al. 2025 (arXiv 2503.14456), section 4.2. State: the last real input, next to that of the recurrence.
    """

    undecayed = ("mix",)

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx, width = layer_idx, config.hidden_size
        self.mix = nn.Parameter(torch.empty(width))
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.up_proj,), output=self.down_proj)
        channel = torch.arange(config.hidden_size) / config.hidden_size
        power = (1 - self.layer_idx / config.num_hidden_layers) ** 4
        init.copy_(self.mix, (1 - channel**power).to(self.mix))

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        cache = self_attention_cache(past_key_values)
        layer: Any = None if cache is None else cache.layers[self.layer_idx if step is None else step]
        window = None if layer is None else layer.state.get(WINDOW)
        before, window = token_before(hidden_states, window, context.query_padding_mask, context.segment_ids)
        if layer is not None:
            layer.advance(0, **{WINDOW: window})  # attention has counted the tokens
        mixed = torch.addcmul(hidden_states, before - hidden_states, self.mix)
        return SublayerOutput(self.down_proj(F.relu(self.up_proj(mixed)).square()))


class RWKV7Layer(XFormerLayer):
    """Attention and channel mixing, each in a frame."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "channel_mixing":
            return ChannelMixing(config, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "rwkv7")
class RWKV7BlockSpec(BlockSpec):
    """Attention, and channel mixing in place of a feed-forward network (Peng et al. 2025, arXiv 2503.14456). It has
    `intermediate_size` inner channels, and reads the token before, so that attention has to keep a state."""

    mixes: ClassVar[str] = "its channel mixing reads the token before"
    supports = frozenset({"packed_rows", "unpadding"})
    summary = "attention, and a feed-forward with token shift: RWKV-7's layer"

    def check(self, config) -> None:
        kept = config.attention.cache_layer(config)
        if not config.is_decoder or not isinstance(kept, RecurrentStateLayer) or kept.by_slot:
            raise ValueError(
                "block 'rwkv7' is causal and keeps a token next to the state of a recurrence, which attention"
                f" {config.attention.type!r} here has not; use a decoder with attention 'rwkv7' or another recurrence,"
                " or the block 'vanilla'."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        # Of type attention: it is given the cache.
        mixing = SublayerPlan("channel_mixing", "attention")
        return [SublayerPlan("attention", "attention"), *reading, mixing]

    def build(self, config, **where) -> RWKV7Layer:
        return RWKV7Layer(config, self, **where)
