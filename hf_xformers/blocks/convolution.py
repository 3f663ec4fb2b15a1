# SPDX-License-Identifier: Apache-2.0
"""A convolution next to some layers, which reads what they read."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, check_layers, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer, WindowSublayer, check_window_block


class Convolution(WindowSublayer):
    """act(W * x + b) over k tokens, x [B, T, D] -> [B, T, D], with zeros beyond the text: n-grams for the layers above
    (He et al. 2021, DeBERTa, arXiv 2006.03654, released code of its second version).

    In an encoder the kernel is centered on its token, in a decoder it ends there. Cost O(T k D^2 / groups). State: the
    last k - 1 inputs.
    """

    def __init__(self, config, spec: ConvolutionBlockSpec, layer_idx: int):
        super().__init__("convolution", layer_idx)
        self.kernel, self.is_causal = spec.kernel, config.is_decoder
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, spec.kernel, groups=spec.groups)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = ACT2FN[spec.activation]

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        if self.is_causal:
            states = self.with_past(hidden_states, self.kernel - 1, context, past_key_values, step)
        else:
            reach = self.kernel // 2
            states = F.pad(self.real_inputs(hidden_states, context), (0, 0, reach, reach))
        mixed = self.conv(states.transpose(1, 2)).transpose(1, 2)
        return SublayerOutput(self.activation(self.dropout(mixed)))


class ConvolutionLayer(XFormerLayer):
    """A vanilla layer, in some layers with a convolution of its input next to it."""

    def __init__(self, config, block: ConvolutionBlockSpec, **where):
        super().__init__(config, block, **where)
        if any(entry.name == "convolution" for entry in self.plan):
            self.get_submodule("convolution_residual").dropout = nn.Identity()  # it stands before the activation

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "convolution":
            return Convolution(config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "convolution", aliases=("conv_beside",))
class ConvolutionBlockSpec(BlockSpec):
    """y = leave(layer(x), act(Conv_k(enter(x)))) in some layers, with the config's residual; under `post_ln` that is
    LN(layer(x) + act(Conv_k(x))).

    Args:
        layers: which (DeBERTa: the first).
        kernel: odd width k.
        groups: of channels that the convolution keeps apart.
        activation: name in transformers' activation table.
    """

    in_sequence: ClassVar[bool] = False
    mixes: ClassVar[str] = "its convolution reads a token's neighbors"

    summary = "a convolution of the first layer's input is added to its output"

    kernel: int = 3
    groups: int = bounded(1, least=1)
    activation: str = "tanh"
    layers: tuple[int, ...] = bounded((0,), least=0)

    def check_fields(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"block 'convolution' needs an odd `kernel`, got {self.kernel}.")
        if self.activation not in ACT2FN:
            raise ValueError(
                f"block 'convolution': unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )

    def check(self, config) -> None:
        check_layers(self, config)
        if config.hidden_size % self.groups:
            raise ValueError(
                f"block 'convolution' divides `hidden_size` {config.hidden_size} into `groups`, got {self.groups};"
                " give a number that divides it."
            )
        if not config.residual.module.keeps_stream:
            raise ValueError(
                f"block 'convolution' adds a convolution of a layer's input to what the layer gives, which residual"
                f" {config.residual.type!r} would put in its place; use 'post_ln' or another one that adds."
            )
        check_window_block("convolution", config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        # Of type attention: it is given the cache.
        beside = [SublayerPlan("convolution", "attention", reads="layer_input")] if layer_idx in self.layers else []
        return [
            SublayerPlan("attention", "attention"),
            *reading,
            SublayerPlan("feedforward", "feedforward"),
            *beside,
        ]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> ConvolutionLayer:
        return ConvolutionLayer(config, self, **where)
