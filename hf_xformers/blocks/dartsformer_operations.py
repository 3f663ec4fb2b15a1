# SPDX-License-Identifier: Apache-2.0
"""The operations among which DARTSformer's search chooses, each on a part of the channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput
from .gated_linear import GatedLinear
from .narrow import reshaped
from .token_convolution import TokenConvolution, TokenConvolutionForm
from .window_state import WindowSublayer

CROSS = "cross_attention"
NOTHING = ("zero", "identity")
CONVOLUTIONS = {f"conv_{width}": width for width in (3, 5, 7, 11)}
DYNAMIC = {f"dynamic_conv_{width}": width for width in (3, 7, 11, 15)}
# Zhao et al. 2021, section 3: what an encoder's parts choose among; a decoder's have cross-attention as well.
CANDIDATES = (*CONVOLUTIONS, *DYNAMIC, "attention", "glu", "ffn", *NOTHING)


def part_of(config: Any, parts: int) -> Any:
    """The config of a layer as one of its `parts` of the channels sees it."""
    view = reshaped(config, width=config.hidden_size // parts)
    view.intermediate_size = max(config.intermediate_size // parts, 1)
    return view


class PartConvolution(WindowSublayer):
    """relu(conv_k(x)), with zeros beyond the text."""

    def __init__(self, name: str, width: int, kernel: int, layer_idx: int):
        super().__init__(name, layer_idx)
        self.conv = nn.Conv1d(width, width, kernel)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        windows = self.windows_of(hidden_states, self.conv.weight.shape[-1], context, past_key_values, step)
        return SublayerOutput(F.relu(self.conv(windows.transpose(1, 2)).transpose(1, 2)))


def build_operation(config: Any, name: str, parts: int, where: str, layer_idx: int) -> Sublayer:
    """The module of operation `name` on one of `parts` of the channels. where: under which a convolution's state is
    kept."""
    view = part_of(config, parts)
    width = view.hidden_size
    if name in CONVOLUTIONS:
        return PartConvolution(where, width, CONVOLUTIONS[name], layer_idx)
    if name in DYNAMIC:
        form = TokenConvolutionForm(DYNAMIC[name], view.num_attention_heads)
        return TokenConvolution(where, width, form, layer_idx)
    if name == "attention":
        return config.attention.build(view, layer_idx=layer_idx)
    if name == "glu":
        return GatedLinear(width)
    if name == "ffn":
        return config.feedforward.build(view, layer_idx=layer_idx)
    attention = config.cross_attention.build(view, layer_idx=layer_idx, cross=True)
    for projection in ("k_proj", "v_proj"):  # the memory has all channels
        old = getattr(attention, projection)
        new = nn.Linear(config.hidden_size, old.out_features, bias=old.bias is not None)
        setattr(attention, projection, new)
    return attention


def build_frame(config: Any, parts: int, layer_idx: int) -> nn.Module:
    """LN(x + o(x)) of an operation, or whatever the config's residual makes of it."""
    return config.residual.build(part_of(config, parts), scale=1.0, layer_idx=layer_idx, siblings=[])
