# SPDX-License-Identifier: Apache-2.0
"""The plain stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.cache_utils import Cache

from ..blocks.base import XFormerLayer, unpack_layer
from ..core.components import register
from ..core.context import LayerContext, add_losses
from ..position.base import PositionActs
from .base import Stack, StackOutput, StackSpec, memory_by_step


class PlainStack(Stack):
    """Every layer once, in order."""

    def forward(
        self,
        layers: Sequence[XFormerLayer],
        hidden_states: Tensor,
        context: LayerContext,
        *,
        position: PositionActs,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        collect: Callable[[Tensor], None] | None = None,
    ) -> StackOutput:
        """As every stack; collect: called with each layer's output."""
        aux_losses: dict[str, Tensor] = {}
        for layer in layers:
            layer.prepare(context, past_key_values)
        streams = context.streams
        hidden_states, positions = context.packed(hidden_states), context.packed(context.positions)
        memories = memory_by_step(memory, len(layers))
        for step, layer in enumerate(layers):
            hidden_states = position.embed_layer(hidden_states, positions, step)
            output = layer(
                hidden_states,
                memories[step],
                *streams.values(),
                context=context,
                step=step,
                stream_names=tuple(streams),
                past_key_values=past_key_values,
            )
            hidden_states, streams, losses = unpack_layer(output)
            add_losses(aux_losses, losses)
            if collect is not None:
                collect(hidden_states)
        return StackOutput(context.padded(hidden_states), context, aux_losses, streams=streams)


@register("stack", "plain")
class PlainStackSpec(StackSpec):
    """Layers one after the other (Vaswani et al. 2017)."""

    packed = True
    tells_earlier_ids = True
    context_parallel = True
    passes_log_probs = True
    drops_layers = True
    summary = "layers one after the other"
    unpads = True

    def build(self, config, **where) -> PlainStack:
        return PlainStack()
