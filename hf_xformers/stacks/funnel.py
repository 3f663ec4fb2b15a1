# SPDX-License-Identifier: Apache-2.0
"""The Funnel-Transformer's stack: the sequence is halved from block to block, and brought back to its length at the
end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attention.shared.base import KeyStates
from ..attention.shared.query_grid import Grid, QueryGrid
from ..blocks.base import XFormerLayer
from ..core.call import Call, add_losses
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.holes import PaddingBehind
from ..core.prepared import States, one_state
from .base import Stack, StackSpec
from .driver import Pass, StackOutput

Tokens = tuple[Tensor, Tensor | None, Tensor | None]  # [B, T, D], which are real, the types of their tokens


class FunnelStack(Stack):
    """h^b_0 = layer(pool(h^{b-1}); h^{b-1}), then h^b = layer(h^b) (Dai et al. 2020, arXiv 2006.03236, section 2.2).

    At the start of every block but the first, pairs of states are pooled; the pooled ones are queries, and keys and
    values are still those before pooling. Their positions keep the original spacing, 2^(b-1) tokens. The first token
    ([CLS]) may stay apart: it is not pooled and has no position. With `upsample`, each final state is repeated over
    the tokens it stands for and added to the first block's output, which `decoder_layers` more layers read (section
    2.3).

    Padding stands behind each row's tokens here ([`PaddingBehind`]), and a pair with one real token is that token, so
    what a row gets does not depend on padding. Texts of two tokens and less are pooled like any other (the released
    code stops there).
    """

    def __init__(self, config, spec: FunnelSpec):
        super().__init__()
        self.spec = spec
        self.sizes, self.repeats = spec.blocks(config), spec.repeats(config)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context, layers = run.hidden_states, run.context, run.layers
        real, types = context.padding_mask, context.inputs.get("token_type_ids")
        steps = _Run(layers, context, self.spec)
        first, first_real, first_types = hidden_states, real, types
        index = 0
        for block, (size, repeats) in enumerate(zip(self.sizes, self.repeats, strict=True)):
            stride, source = 2**block, None
            if block:
                source = (hidden_states, real, types)
                hidden_states, real = self.pool(hidden_states, real)
                types = self.first_of_pairs(types)
            grid = Grid(0, stride=stride, apart=self.spec.separate_cls)
            inner = steps.context(hidden_states, real, QueryGrid(grid, types=(types, types)))
            for layer in layers[index : index + size]:
                for _ in range(repeats):
                    if source is None:
                        hidden_states = steps(layer, hidden_states, inner)
                    else:
                        hidden_states = steps.boundary(layer, (hidden_states, real, types), source, stride // 2)
                        source = None
            index += size
            if block == 0:
                first = hidden_states
        if not self.spec.upsample:
            if real is None:  # whoever reads these states must not take the mask of the longer text for theirs
                real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            return StackOutput(hidden_states, context.derive(padding_mask=real), steps.losses)
        hidden_states = self.repeated(hidden_states, real, first.shape[1]) + first
        grid = Grid(0, apart=self.spec.separate_cls)
        inner = steps.context(hidden_states, first_real, QueryGrid(grid, types=(first_types, first_types)))
        for layer in layers[index:]:
            hidden_states = steps(layer, hidden_states, inner)
        return StackOutput(hidden_states, context, steps.losses)

    def pool(self, states: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """states [B, T, D], real [B, T] with padding last or None -> pooled states [B, T', D] and which are real.

        T' = 1 + ceil((T - 1 - truncate) / 2) with [CLS] apart, else ceil(T / 2)."""
        length, apart = states.shape[1], int(self.spec.separate_cls)
        place = torch.arange(length, device=states.device)
        counted = torch.ones_like(place, dtype=torch.bool)[None] if real is None else real
        total = length
        if apart and self.spec.truncate and length > 1:  # each row's last token is left out
            ends = length if real is None else real.sum(1, keepdim=True)
            counted, total = counted & ((place < ends - 1) | (place == 0)), length - 1
        body, counts = states[:, apart:total], counted[:, apart:total]
        if body.shape[1] % 2:
            body, counts = nn.functional.pad(body, (0, 0, 0, 1)), nn.functional.pad(counts, (0, 1))
        pairs, members = body.unflatten(1, (-1, 2)), counts.unflatten(1, (-1, 2)).unsqueeze(-1)
        if self.spec.pooling == "mean":
            pooled = (pairs * members).sum(2) / members.sum(2).clamp(min=1).to(states.dtype)
        else:
            lowest = torch.finfo(states.dtype).min
            pooled = pairs.masked_fill(~members, lowest).amax(2).masked_fill(~members.any(2), 0.0)
        pooled = torch.cat([states[:, :apart], pooled], dim=1)
        if real is None:
            return pooled, None
        return pooled, torch.cat([real[:, :apart], members.any(2).squeeze(-1)], dim=1)

    def first_of_pairs(self, types: Tensor | None) -> Tensor | None:
        """Token types [B, T] -> those of pooled states, [B, T']: of the first token of each."""
        if types is None:
            return None
        apart = int(self.spec.separate_cls)
        total = types.shape[1] - int(apart and self.spec.truncate and types.shape[1] > 1)
        return torch.cat([types[:, :apart], types[:, apart:total:2]], dim=1)

    def repeated(self, states: Tensor, real: Tensor | None, length: int) -> Tensor:
        """Each state [B, T', D] over the tokens that it stands for, [B, length, D]; 0 for tokens that were cut off."""
        stride, apart = 2 ** (len(self.sizes) - 1), int(self.spec.separate_cls)
        place = torch.arange(length, device=states.device)
        source = torch.where(place < apart, place, (place - apart) // stride + apart)
        inside, source = source < states.shape[1], source.clamp(max=states.shape[1] - 1)
        found = inside[None] if real is None else inside[None] & real[:, source]
        return states[:, source] * found.unsqueeze(-1)


class _Run:
    """The layers of one forward call, with its step count and auxiliary losses."""

    def __init__(self, layers: Sequence[XFormerLayer], context: Call, spec: FunnelSpec):
        self.layers, self.base, self.spec = layers, context, spec
        self.step = 0
        self.losses: dict[str, Tensor] = {}

    def context(self, states: Tensor, real: Tensor | None, moved: QueryGrid) -> Call:
        """The state bundle for states [B, T, D] of another length."""
        index = torch.arange(states.shape[1], device=states.device)
        places = index[None] * moved.grid.stride
        context = self.base.derive(padding_mask=real, positions=places, query_index=index, key_index=index, fresh=True)
        context.keep(moved)
        for layer in self.layers:
            layer.prepare(context, None)
        return context

    def __call__(self, layer: XFormerLayer, states: Tensor, context: Call, further: States | None = None) -> Tensor:
        given = {**context.states, **(further or {})}
        states, _, losses = layer(states, None, given, context=context, step=self.step)
        add_losses(self.losses, losses)
        self.step += 1
        return states

    def boundary(self, layer: Any, queries: Tokens, keys: Tokens, stride: int) -> Tensor:
        """Pooled queries read the states before pooling, which stand `stride` tokens apart."""
        apart = self.spec.separate_cls
        (pooled, pooled_real, types), (states, real, key_types) = queries, keys
        if not self.spec.pool_query_only:
            moved = QueryGrid(Grid(0, stride=2 * stride, apart=apart), types=(types, types))
            return self(layer, pooled, self.context(pooled, pooled_real, moved))
        grid = Grid(-int(apart), step=2, stride=stride, apart=apart)
        context = self.context(pooled, pooled_real, QueryGrid(grid, states.shape[1], real, (types, key_types)))
        return self(layer, pooled, context, one_state(KeyStates(layer.frame(layer.plan[0]).enter(states))))


@register("stack", "funnel")
class FunnelSpec(StackSpec):
    """
    Args:
        upsample: give states of the full length, after `decoder_layers` more layers; else states of the last block's
            length, for tasks on whole texts.
        decoder_layers: layers after the upsampling (`None`: 2, fewer where less than three would be left for the
            blocks).
        block_sizes: layers of each block, which with those sum to `num_hidden_layers` (`None`: three blocks alike, as
            far as the layers go).
        block_repeats: how often each layer of a block runs (`None`: once).
        pooling: of pairs.
        pool_query_only: keys and values of a block's first layer are not pooled.
        separate_cls: the first token is never pooled.
        truncate: with that, leave out the last token before pooling, so that lengths stay powers of two.
    """

    shares = "prepared"
    keeps_tokens = False

    summary = "sequence halved from block to block, then brought back to its length"

    block_sizes: tuple[int, ...] | None = bounded(None, least=1)
    block_repeats: tuple[int, ...] | None = bounded(None, least=1)
    pooling: Literal["mean", "max"] = "mean"
    pool_query_only: bool = True
    separate_cls: bool = True
    truncate: bool = True
    upsample: bool = True
    decoder_layers: int | None = bounded(None, least=0)

    def after(self, config) -> int:
        """Layers after up-sampling."""
        if not self.upsample:
            return 0
        return min(2, max(config.num_hidden_layers - 3, 0)) if self.decoder_layers is None else self.decoder_layers

    def blocks(self, config) -> tuple[int, ...]:
        """Layers of each block."""
        if self.block_sizes is not None:
            return self.block_sizes
        layers = config.num_hidden_layers - self.after(config)
        count = max(min(3, layers), 1)
        return tuple(layers // count + (block < layers % count) for block in range(count))

    def repeats(self, config) -> tuple[int, ...]:
        """Runs of each layer, by block."""
        return (1,) * len(self.blocks(config)) if self.block_repeats is None else self.block_repeats

    def gives_every_token(self, config) -> bool:
        return self.upsample

    def call_feature(self, config) -> PaddingBehind:
        return PaddingBehind()

    def num_steps(self, config) -> int:
        runs = sum(size * repeat for size, repeat in zip(self.blocks(config), self.repeats(config), strict=True))
        return runs + self.after(config)

    def check(self, config) -> None:
        blocks = self.blocks(config)
        if sum(blocks) + self.after(config) != config.num_hidden_layers or min(blocks) < 1:
            raise ValueError(
                f"funnel's `block_sizes` {list(blocks)} and the {self.after(config)} layers after up-sampling must sum"
                f" to `num_hidden_layers` {config.num_hidden_layers}."
            )
        if len(self.repeats(config)) != len(blocks):
            raise ValueError(
                f"funnel needs as many `block_repeats` as blocks, got {list(self.repeats(config))} for {len(blocks)}."
            )
        if HandOver.POOLED_QUERIES not in config.attention.reads:
            raise ValueError(
                "funnel's pooled queries need an attention that takes positions of its own, which"
                f" {config.attention.type!r} does not; set `attention='transformer_xl'`."
            )
        if config.position.acts - {"input"}:
            raise ValueError(
                f"funnel's lengths differ between layers, where position {config.position.type!r} acts; use 'none'"
                " (the attention knows positions) or one that acts on the input."
            )
        if config.block.plan(config, 0, False)[0].name != "attention":
            raise ValueError(
                f"funnel pools before a layer's attention, which does not come first in block {config.block.type!r};"
                " use 'vanilla'."
            )

    def build(self, config, **where) -> FunnelStack:
        if config.is_decoder:
            raise ValueError(
                "funnel pools later tokens into earlier ones and cannot stand in a decoder; give the decoder another"
                " stack, e.g. `decoder={'stack': 'plain'}` in an encoder-decoder."
            )
        if config.is_heterogeneous:
            raise ValueError("funnel's layers cannot differ one by one; leave out `per_layer_config`.")
        return FunnelStack(config, self)
