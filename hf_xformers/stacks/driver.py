# SPDX-License-Identifier: Apache-2.0
"""The driver of the depth loop: one way through the layers of a tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..blocks.base import XFormerLayer, flattened, unflattened
from ..core.call import Call, add_losses
from ..core.prepared import States
from ..core.segment_memory import SegmentMemory
from ..position.base import Position


@dataclass
class StackOutput:
    """
    Args:
        hidden_states: [B, T', D] after the last layer (T' may differ from the input's T).
        context: the state bundle that belongs to them.
        aux_losses: scalars by name.
        memories: [B, steps of the decoder, T', D], an encoder's own memory for each decoder layer, or None.
        segment_memory: what the next segment of the text may read of this one, or None.
        states: what the last layer passed on.
        summaries: [B, G, D], states of global tokens that stand for parts of the text, in their order, from a stack
            that gives [`HandOver.SUMMARIES`].
    """

    hidden_states: Tensor
    context: Call
    aux_losses: dict[str, Tensor] = field(default_factory=dict)
    memories: Tensor | None = None
    segment_memory: SegmentMemory | None = None
    states: States = field(default_factory=dict)
    summaries: Tensor | None = None


def memory_by_step(memory: Tensor | None, steps: int) -> Sequence[Tensor | None]:
    """What cross-attention reads at each execution step: the one memory [B, M, D], or its own of [B, steps, M, D].

    Raises:
        ValueError: the number of memories is not that of the steps.
    """
    if memory is None or memory.ndim == 3:
        return [memory] * steps
    if memory.shape[1] != steps:
        raise ValueError(
            f"The decoder runs {steps} layers, but `encoder_hidden_states` {list(memory.shape)} hold {memory.shape[1]}"
            " memories; give [batch, length, width] for one that all layers read."
        )
    return memory.unbind(1)


class Pass:
    """One way through the layers, which a stack is given and runs.

    Attributes:
        states: what the next layer is given besides hidden states.
        losses: auxiliary losses so far, by name.
        collect: called with each layer's output.

    Args:
        layers: by depth.
        hidden_states: [B, T, D], what the first layer is given, then the next one; after [`Pass.begin`] of real tokens
            alone, where layers are given those.
        context: the call.
        position: the tower's.
        memory: [B, M, D] of an encoder, or one for each step [B, steps, M, D].
        past_key_values: the cache.
    """

    positions: Tensor
    memories: Sequence[Tensor | None]
    states: States

    def __init__(
        self,
        layers: Sequence[XFormerLayer],
        hidden_states: Tensor,
        context: Call,
        position: Position,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> None:
        self.layers, self.hidden_states, self.context, self.position = layers, hidden_states, context, position
        self.memory, self.past_key_values = memory, past_key_values
        self.losses: dict[str, Tensor] = {}
        self.collect: Callable[[Tensor], None] | None = None

    def to(self, device: torch.device | str | int, **_: object) -> Pass:
        """Before it begins, on another device, for models whose modules are divided over several (Accelerate)."""
        moved = self.within(self.hidden_states.to(device), self.context.to(device))
        moved.memory = None if self.memory is None else self.memory.to(device)
        moved.past_key_values, moved.collect = self.past_key_values, self.collect
        return moved

    def within(self, hidden_states: Tensor, context: Call, layers: Sequence[XFormerLayer] | None = None) -> Pass:
        """Another way through these layers (None: all), with other states in a call of their own, without memory and
        cache."""
        return Pass(self.layers if layers is None else layers, hidden_states, context, self.position)

    def begin(self, steps: int | None = None) -> None:
        """All layers prepare the call. steps: executions of a layer (None: one of each)."""
        context = self.context
        for layer in self.layers:
            layer.prepare(context, self.past_key_values)
        self.hidden_states, self.positions = context.packed(self.hidden_states), context.packed(context.positions)
        self.memories = memory_by_step(self.memory, len(self.layers) if steps is None else steps)
        self.states = context.states

    def embed(self, step: int) -> None:
        """What the position adds to the input of the layer that runs next."""
        self.hidden_states = self.position.embed_layer(self.hidden_states, self.positions, step)

    def layer(self, step: int, layer: XFormerLayer | None = None, further: States | None = None) -> None:
        """One layer (None: number `step`), with states that it alone is given."""
        self.hidden_states, self.states, losses = (self.layers[step] if layer is None else layer)(
            self.hidden_states,
            self.memories[step],
            self.states if further is None else {**self.states, **further},
            context=self.context,
            step=step,
            past_key_values=self.past_key_values,
        )
        add_losses(self.losses, losses)
        if self.collect is not None:
            self.collect(self.hidden_states)

    def step(self, step: int, layer: XFormerLayer | None = None) -> Tensor:
        """Both; gives the new hidden states."""
        self.embed(step)
        self.layer(step, layer)
        return self.hidden_states

    def narrow(self, rows: Tensor, context: Call) -> None:
        """Continues with some rows [R] alone, whose call `context` is. What no layer has touched is made anew with the
        rest; what layers pass on is cut."""
        before, passed = (dict(zip(*flattened(states), strict=True)) for states in (self.context.states, self.states))
        for layer in self.layers:
            layer.prepare(context, None)
        now = dict(zip(*flattened(context.states), strict=True))
        for name, tensor in passed.items():
            if tensor is not before.get(name):
                now[name] = tensor if tensor.shape[0] == 1 else tensor[rows]  # what leads with 1 serves all rows
        self.context, self.states = context, unflattened(now, list(now.values()))
        self.hidden_states, self.positions = self.hidden_states[rows], context.positions

    def output(self) -> StackOutput:
        """What the stack gives."""
        context = self.context
        return StackOutput(context.padded(self.hidden_states), context, self.losses, states=self.states)
