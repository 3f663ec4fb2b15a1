# SPDX-License-Identifier: Apache-2.0
"""DeLighT: a deep and light transformation of each token before an attention of half the width."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput
from ..core.components import bounded, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .narrow import check_reshaped, reshaped

# Widths between group linear layers are multiples of this (released code).
_MULTIPLE = 8


@dataclass(frozen=True)
class GroupLayer:
    """Sizes of one group linear layer: channels in and out, and groups that share them."""

    inputs: int
    outputs: int
    groups: int


def layer_sizes(width: int, depth: int, multiplier: float, max_groups: int, factor: int = 2) -> list[GroupLayer]:
    """The group linear layers of a transformation of `width` channels (Mehta et al. 2021, section 3.1; widths as the
    released code rounds them): from width / factor channels to multiplier * width and back, with twice the groups in
    each layer on the way, up to `max_groups`."""
    narrow, half = width // factor, math.ceil(depth / 2)
    widest = int(width * multiplier)
    rising = [int(narrow + (widest - narrow) * step / max(half - 1, 1)) for step in range(half)]
    groups = [min(2 ** (step + 1), max_groups) for step in range(half)]
    back = slice(depth % 2, None)  # of an odd number of layers, the one in the middle stands once
    outputs, groups = rising + rising[::-1][back], groups + groups[::-1][back]
    layers, inputs = [], narrow
    for index in range(depth):
        if index + 1 < depth:
            multiple = math.lcm(groups[index], groups[index + 1], _MULTIPLE)
            outputs[index] = math.ceil(outputs[index] / multiple) * multiple
        layers.append(GroupLayer(inputs, outputs[index], groups[index]))
        inputs = outputs[index] + narrow
    return layers


class GroupLinear(nn.Module):
    """y_g = act(norm(x_g W_g + b_g)) for each group g of channels; the groups of the product are shuffled first if
    that is asked for, and share a norm. x [..., in] -> [..., out]."""

    def __init__(self, config, sizes: GroupLayer, shuffle: bool, activation: str):
        super().__init__()
        self.sizes, self.shuffle = sizes, shuffle
        groups, inputs, outputs = sizes.groups, sizes.inputs // sizes.groups, sizes.outputs // sizes.groups
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs))
        self.norm = config.normalization.build(config, width=outputs)
        self.activation = ACT2FN[activation]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        bound = (6 / sum(self.weight.shape[1:])) ** 0.5  # Glorot's for each group
        init.uniform_(self.weight, -bound, bound)
        init.zeros_(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., groups, out / groups], in the order of groups."""
        groups = self.sizes.groups
        by_group = x.reshape(-1, groups, self.weight.shape[1]).transpose(0, 1)
        result = torch.baddbmm(self.bias[:, None].to(by_group.dtype), by_group, self.weight)
        return result.transpose(0, 1).reshape(*x.shape[:-1], groups, -1)

    def forward(self, x: Tensor) -> Tensor:
        result = self.product(x)
        if self.shuffle:
            result = result.mT.reshape(result.shape)
        return self.dropout(self.activation(self.norm(result))).flatten(-2)


class DExTra(nn.Module):
    """h_0 = act(norm(x W_in)); h_l = GLT_l([h_0 ; h_(l-1)] mixed by groups); y = act(norm([h_0 ; h_N] W_out)).

    Mehta, Ghazvininejad, Iyer, Zettlemoyer and Hajishirzi 2021 (arXiv 2008.00623), section 3.1. The first layer reads
    h_0 alone; before every other one the channels of h_0 and of the layer below are dealt out to its groups. Token by
    token: [..., D] -> [..., D / factor].
    """

    def __init__(self, config, spec: DelightBlockSpec, layer_idx: int):
        super().__init__()
        narrow = spec.inner_width(config)
        self.up_proj = nn.Linear(config.hidden_size, narrow)
        self.norm = config.normalization.build(config, width=narrow)
        self.activation = ACT2FN[spec.activation]
        self.layers = nn.ModuleList(
            GroupLinear(config, sizes, spec.shuffle, spec.activation) for sizes in spec.sizes(config, layer_idx)
        )
        self.down_proj = nn.Linear(2 * narrow, narrow)
        self.output_norm = config.normalization.build(config, width=narrow)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        first = self.dropout(self.activation(self.norm(self.up_proj(x))))
        hidden = first
        for index, layer in enumerate(self.layers):
            if index:
                groups = cast(GroupLinear, layer).sizes.groups
                mixed = (part.unflatten(-1, (groups, -1)) for part in (first, hidden))
                hidden = torch.cat(tuple(mixed), dim=-1).flatten(-2)
            hidden = layer(hidden)
        joined = self.down_proj(torch.cat((first, hidden), dim=-1))
        return self.dropout(self.activation(self.output_norm(joined)))


class DelightAttention(Sublayer):
    """attention(DExTra(x)) with queries, keys and values of half the width, and an output of the whole one
    (section 3.2). Cost: half of attention's; state: keys and values of half the width."""

    def __init__(self, config, spec: DelightBlockSpec, layer_idx: int):
        super().__init__()
        self.dextra = DExTra(config, spec, layer_idx)
        self.attention = config.attention.build(spec.attention_part(config), layer_idx=layer_idx)
        if spec.proj_factor > 1:
            width, bias = self.attention.o_proj.in_features, config.attention.has_output_bias
            self.attention.o_proj = nn.Linear(width, config.hidden_size, bias=bias)

    @property
    def takes_unpadded(self) -> bool:
        return self.attention.takes_unpadded

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
        return self.attention(self.dextra(hidden_states), context, past_key_values=past_key_values, step=step)


class DelightLayer(XFormerLayer):
    """DExTra and attention, cross-attention of half the width, feed-forward."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name == "transformed":
            return DelightAttention(config, config.block, layer_idx)
        if entry.kind == "cross_attention":
            config = config.block.reading_part(config)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "delight")
class DelightBlockSpec(BlockSpec):
    """x <- x + SHA(DExTra(x)); [x <- x + XA(x)]; x <- x + FF(x), with the config's norms. Attention is meant to have
    one head, and the feed-forward a quarter of the width (`intermediate_size` = `hidden_size` / 4).

    Block-wise scaling: layer b of B has N_b = min_depth + (max_depth - min_depth) b / (B - 1) group linear layers
    (rounded down), and the multiplier width_mult + (max_depth / min_depth - 1) b / (B - 1).

    Args:
        min_depth, max_depth: group linear layers of the first and of the last layer.
        width_mult: widest point of the first layer's transformation, in units of `hidden_size`.
        max_groups: of channels.
        proj_factor: what `hidden_size` is divided by in attention.
        shuffle: whether channels are exchanged between groups (the paper; off in the released recipes).
        scaling: `block`, or the same depth and width in all layers (`uniform`: those of the first).
        activation: its name in transformers' table.
    """

    supports = frozenset({"packed_rows", "unpadding"})
    why_not: ClassVar[Mapping[str, str]] = {"pages": "its heads have another size than pages"}
    passes_states: ClassVar[bool] = False

    summary = "deep and light transformations before attention of half the width"

    min_depth: int = 4
    max_depth: int = 8
    width_mult: float | int = 2.0
    max_groups: int = bounded(8, least=1)
    proj_factor: int = bounded(2, least=1)
    shuffle: bool = True
    scaling: Literal["block", "uniform"] = "block"
    activation: str = "silu"

    def inner_width(self, config) -> int:
        return config.hidden_size // self.proj_factor

    def depth_and_width(self, config, layer_idx: int) -> tuple[int, float]:
        """Group linear layers and the width multiplier of a layer."""
        if self.scaling == "uniform":
            return self.min_depth, float(self.width_mult)
        share = layer_idx / max(config.num_hidden_layers - 1, 1)
        depth = self.min_depth + (self.max_depth - self.min_depth) * share
        return int(depth + 1e-9), self.width_mult + (self.max_depth / self.min_depth - 1) * share

    def sizes(self, config, layer_idx: int) -> list[GroupLayer]:
        depth, multiplier = self.depth_and_width(config, layer_idx)
        return layer_sizes(config.hidden_size, depth, multiplier, self.max_groups, self.proj_factor)

    def attention_part(self, config) -> Any:
        """The layer's config as its self-attention sees it."""
        return reshaped(config, width=self.inner_width(config))

    def reading_part(self, config) -> Any:
        """The layer's config as its cross-attention sees it: queries, keys and values of the inner width."""
        view = copy.copy(config)
        view.head_dim = self.attention_part(config).head_width
        return view

    def check_fields(self) -> None:
        if not 2 <= self.min_depth <= self.max_depth:
            raise ValueError(
                f"block 'delight' needs 2 <= `min_depth` <= `max_depth`, got {self.min_depth} and {self.max_depth}."
            )
        if self.width_mult * self.proj_factor < 1:
            raise ValueError(
                f"block 'delight' needs a `width_mult` of 1 / `proj_factor` or more, got {self.width_mult}: its"
                " transformation widens."
            )
        if self.activation not in ACT2FN:
            raise ValueError(
                f"block 'delight': unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )

    def check(self, config) -> None:
        norm = config.normalization
        if norm.over_tokens or not norm.any_width:
            raise ValueError(
                f"block 'delight' normalizes groups of channels, which normalization {norm.type!r} cannot; use"
                " 'layer_norm' or 'rms_norm'."
            )
        if config.attention.aggregation is not None:
            raise ValueError(
                "block 'delight' has an output projection of its own, so its attention cannot join heads by an"
                f" `aggregation`, got {config.attention.aggregation.type!r}; leave it out."
            )
        width = self.inner_width(config)
        groups = {sizes.groups for index in range(config.num_hidden_layers) for sizes in self.sizes(config, index)}
        if config.hidden_size % self.proj_factor or any(width % count for count in groups):
            raise ValueError(
                f"block 'delight' deals out {config.hidden_size} / {self.proj_factor} channels to up to {max(groups)}"
                " groups, which cannot share them evenly; change `hidden_size`, `proj_factor` or `max_groups`."
            )
        check_reshaped("delight", config, self.attention_part(config))

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [SublayerPlan("transformed", "attention"), *reading, SublayerPlan("feedforward", "feedforward")]

    def build(self, config, **where) -> DelightLayer:
        return DelightLayer(config, self, **where)
