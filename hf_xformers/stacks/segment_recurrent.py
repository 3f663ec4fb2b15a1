# SPDX-License-Identifier: Apache-2.0
"""The segment-recurrent stack: every layer also reads what went into it, or came out of it, in earlier segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..blocks.base import XFormerLayer
from ..core.cache import RecurrentStateLayer
from ..core.call import Call, add_losses, can_inspect, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import one_state
from ..core.segment_memory import (
    MemoryCacheLayer,
    MemoryLayout,
    SegmentCacheLayer,
    SegmentMemory,
    StepMemory,
    join_masks,
)
from ..core.text_parts import TextParts
from ..ops.common.real_tokens import from_first_real
from .base import Stack, StackSpec
from .driver import Pass, StackOutput
from .text_segments import TextSegments

SEGMENT_MEMORY = "segment_memory"


class SegmentRecurrentStack(Stack):
    """h^n = layer(h^{n-1}; [SG(m^{n-1}) ; h^{n-1}]), m^{n-1} <- the last M of [m^{n-1} ; h^{n-1}] (Dai et al. 2019,
    arXiv 1901.02860, section 3.2).

    A layer's memory is its own input in earlier segments, without gradient. It comes and goes as `segment_memory`
    ([`SegmentMemory`]); without one the text begins with this segment. Padding never enters the memory, so a row's
    memory is its own last M real tokens, wherever it was padded.

    With `recurrence="same_layer"` a layer's memory is its own output: m^n <- the last M of [m^n ; h^n] (Ding et al.
    2021, arXiv 2012.15688, section 3.3). What a segment holds then reaches all later ones at any depth, where inputs
    carry it one layer higher with each segment.

    An encoder that is given a text longer than `segment_length` reads it in segments, one after the other, and with
    `retrospective` twice: the second time begins with the memory that the first has left, so that every segment sees
    the whole text (section 3.2). The first reading has no gradient, as memories have none.

    With a generation cache the first call stores the memory there, in front of the text; later calls read it from
    there and return none. With same-layer recurrence the text is then one segment after that memory, of which the last
    M + `max_position_embeddings` states stay.

    Under sequence parallelism the part of a text that a process holds is a segment. As memories have no gradient and
    are inputs of the same layer, all segments are read at the same time: before each layer a process is sent the last
    M inputs of it that stand before its part, from as many processes as hold them.
    """

    def __init__(self, config, spec: SegmentRecurrentSpec):
        super().__init__()
        self.spec, self.memory_length = spec, spec.length(config)
        self.retrospective, self.segment_length = spec.looks_back(config), spec.cut_length(config)
        self.remembers_outputs = spec.recurrence == "same_layer"

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        if self.segment_length is None or hidden_states.shape[1] <= self.segment_length:
            return self.read(run)
        text = TextSegments(hidden_states, context, run.position, self.segment_length)
        begin = self.carried(context, hidden_states, len(run.layers))
        if self.retrospective:
            with torch.no_grad():
                _, left = self.read_text(run, text, begin)
            alone = text.single()
            if alone is None:
                begin = left
            else:  # a text of one segment sees all of itself already, and is what it is without the others
                begin = left.where(~alone, begin)
        output, _ = self.read_text(run, text, begin)
        return output

    def read_text(self, run: Pass, text: TextSegments, memory: SegmentMemory) -> tuple[StackOutput, SegmentMemory]:
        """All segments of a text, from a memory on; and the memory at its end."""
        aux_losses: dict[str, Tensor] = {}
        parts = []
        for states, context in text:
            context.inputs[SEGMENT_MEMORY] = memory
            output = self.read(run.within(states, context))
            memory = cast(SegmentMemory, output.segment_memory)
            parts.append(output.hidden_states)
            add_losses(aux_losses, {name: loss / len(text) for name, loss in output.aux_losses.items()})
        return StackOutput(text.joined(parts), text.context, aux_losses, segment_memory=memory), memory

    def read(self, run: Pass) -> StackOutput:
        """One segment."""
        layers, hidden_states, context = run.layers, run.hidden_states, run.context
        length, tokens = hidden_states.shape[1], context.query_padding_mask
        cache = self_attention_cache(run.past_key_values)
        begins = cache is None or cache.get_seq_length() == 0
        slot = self.slot(cache)
        if slot is not None:  # the cache is the memory, so every call is a segment
            run.past_key_values, begins = None, True
        carried = self.spec.empty()
        if slot is not None and slot.memory is not None:
            carried = slot.memory
        elif begins:
            carried = self.carried(context, hidden_states, len(layers))
        states, held = carried.read()
        parts, slots = context.parts, states[0].shape[1] if states else 0
        if parts is not None:
            slots, real = self.slots_of_part(context, parts)
            context.keep(MemoryLayout(slots, real))
        elif states:
            real, order = join_masks(held, slots, tokens, hidden_states), carried.key_order(tokens, length)
            real = real if real is None or order is None else real.gather(1, order)
            context.keep(MemoryLayout(slots, real, order))
        elif not begins and context.padding_mask is not None and self.goes_on_after_a_memory(cache):
            begun = from_first_real(context.padding_mask)[:, context.query_index]
            if not (can_inspect() and bool(begun.all())):
                context.keep(MemoryLayout(begun=begun))
        self.begin(context)
        run.begin()
        kept_states = []
        for step, layer in enumerate(layers):
            run.embed(step)
            if not self.remembers_outputs:
                kept_states.append(run.hidden_states)
            earlier, further = states[step] if states else None, None
            if parts is not None:  # all processes are at the same layer, and so are the segments that they hold
                earlier = parts.before(run.hidden_states, self.memory_length)
            if earlier is not None and slots:  # it enters as the layer's input does: normalized, where that is
                entered = layer.frame(layer.plan[0]).enter(earlier.to(run.hidden_states.dtype))
                further = one_state(StepMemory(entered))
            run.layer(step, layer, further)
            if self.remembers_outputs:
                kept_states.append(run.hidden_states)
        kept = None
        if begins and parts is None and not torch.jit.is_tracing():
            kept, losses = self.remember(layers, carried, kept_states, context)
            add_losses(run.losses, losses)
        if slot is not None and cache is not None:
            slot.memory = kept
            for each in cast(list[RecurrentStateLayer], cache.layers):
                each.advance(length)
        return StackOutput(run.hidden_states, context, run.losses, segment_memory=kept)

    @staticmethod
    def goes_on_after_a_memory(cache: Cache | None) -> bool:
        """Whether keys and values of a memory stand before those of the text in a cache."""
        layer = cache.layers[0] if cache is not None and cache.layers else None
        return isinstance(layer, SegmentCacheLayer) and layer.follows_memory

    def slots_of_part(self, context: Call, parts: TextParts) -> tuple[int, Tensor | None]:
        """How many states before its part of a text this process remembers, and which of these and of its own are real
        [B, slots + t] (None: all).

        Raises:
            ValueError: the text continues another, or its rows are not one text each, without gaps.
        """
        if context.inputs.get(SEGMENT_MEMORY) is not None:
            raise ValueError(
                "Under sequence parallelism the parts of a text are its segments, and the first begins it; leave"
                " `segment_memory` out."
            )
        if parts.documents is not None:
            raise ValueError(
                "Under sequence parallelism a part remembers the one text of its row, but `position_ids` restart"
                " inside a row (packed documents); give each document a row of its own, with an `attention_mask`."
            )
        slots = min(parts.start, self.memory_length)
        if parts.mask is None:
            return slots, None
        begins = parts.mask.clone()
        begins[:, 1:] &= ~parts.mask[:, :-1]
        if bool((begins.sum(1) > 1).any()):
            raise ValueError(
                "Under sequence parallelism a memory is what stands right before a part, and `attention_mask` has"
                " padding between the tokens of a row; pad rows at one end alone."
            )
        return slots, parts.mask[:, parts.start - slots : parts.start + parts.length]

    def begin(self, context: Call) -> None:
        """Called before the layers run."""

    def slot(self, cache: Cache | None) -> MemoryCacheLayer | None:
        """Where a generation cache holds the memory itself; None where it holds keys and values."""
        return None

    def carried(self, context: Call, like: Tensor, steps: int) -> SegmentMemory:
        """The memory given to this call. Raises `TypeError` and `ValueError` for one that does not fit."""
        given = context.inputs.get(SEGMENT_MEMORY)
        if given is None:
            return self.spec.empty()
        kind = type(self.spec.empty())
        if not isinstance(given, kind):
            raise TypeError(
                f"`segment_memory` must be the {kind.__name__} that this model returned, got {type(given).__name__}."
            )
        if not given.states:
            return given
        if context.segment_ids is not None:
            raise ValueError(
                "`segment_memory` continues one text per row, but `position_ids` restart inside a row (packed"
                " documents); leave one of them out."
            )
        expected = (like.shape[0], like.shape[-1])
        found = (given.batch_size, given.states[0].shape[-1])
        if len(given.states) != steps or found != expected:
            raise ValueError(
                f"`segment_memory` has {len(given.states)} layers of [{found[0]}, length, {found[1]}], this call needs"
                f" {steps} of [{expected[0]}, length, {expected[1]}]; give the memory of the same rows and the same"
                " model."
            )
        return given

    def remember(
        self, layers: Sequence[XFormerLayer], carried: SegmentMemory, inputs: Sequence[Tensor], context: Call
    ) -> tuple[SegmentMemory, dict[str, Tensor]]:
        """The memory after this segment, and losses of making it. inputs: of each layer, or what it gave."""
        return carried.update(inputs, context.query_padding_mask, self.memory_length), {}


@register("stack", "segment_recurrent")
class SegmentRecurrentSpec(StackSpec):
    """
    Args:
        memory_length: states of earlier segments that every layer may read, M (tokens; `None`:
            `max_position_embeddings`, the length of a segment).
        recurrence: a layer remembers its inputs (`shift_down`), or what it gave (`same_layer`).
        segment_length: an encoder reads a longer text in segments of so many tokens (`None`:
            `max_position_embeddings`, where it reads twice; else texts are read whole).
        retrospective: an encoder reads such a text twice, the second time with the memory of all of it (`None`: where
            the recurrence is `same_layer`). Needs an attention that reads a segment memory, such as 'transformer_xl'
            or 'adaptive_span'.
    """

    supports = frozenset({"packed_rows"})
    summary = "every layer reads its own input of earlier segments"
    layers_apart = False  # the memory passes through a layer's norm before the layer runs
    inputs = (SEGMENT_MEMORY,)

    memory_length: int | None = bounded(None, least=0)
    recurrence: Literal["shift_down", "same_layer"] = "shift_down"
    segment_length: int | None = bounded(None, least=1)
    retrospective: bool | None = None

    def looks_back(self, config) -> bool:
        """Whether a text of several segments is read twice."""
        if self.retrospective is None:
            return self.recurrence == "same_layer" and not config.is_decoder
        return self.retrospective

    def cut_length(self, config) -> int | None:
        """Tokens of the segments that a longer text is read in; None: it is read whole."""
        if config.is_decoder:  # a cache continues with the text
            return None
        if self.segment_length is None and self.looks_back(config):
            return config.max_position_embeddings
        return self.segment_length

    def length(self, config) -> int:
        """M (tokens)."""
        return config.max_position_embeddings if self.memory_length is None else self.memory_length

    def memory_slots(self, config) -> int:
        """States that a layer reads besides the segment: what a generation cache has room for."""
        return self.length(config)

    def remembers_parts(self, config) -> bool:
        return self.recurrence == "shift_down" and self.cut_length(config) is None

    def cache_slots(self, config) -> int:
        # Keys of a text are made of a layer's inputs, and are a memory only where that holds inputs, too.
        return self.length(config) + (config.max_position_embeddings if self.recurrence == "same_layer" else 0)

    def empty(self) -> SegmentMemory:
        """The memory before the first segment."""
        return SegmentMemory()

    def check(self, config) -> None:
        if self.retrospective and config.is_decoder:
            raise ValueError(
                f"stack {self.type!r} with `retrospective=True` reads a text twice, so that a decoder would have seen"
                " the tokens that it is to predict; leave `retrospective` out, or use an encoder."
            )
        if HandOver.SEGMENT_MEMORY not in config.attention.reads:
            raise ValueError(
                f"stack {self.type!r} has a memory that attention {config.attention.type!r} does not read; set "
                "`attention='transformer_xl'` or 'adaptive_span'."
            )
        kinds = [entry.kind for entry in config.block.plan(config, 0, False)]
        if kinds[0] != "attention" or kinds.count("attention") != 1:
            raise ValueError(
                f"stack {self.type!r} remembers the input of layers that begin with their only attention, which block "
                f"{config.block.type!r} does not; use block 'vanilla'."
            )

    def refuse_two_towers(self, config) -> None:
        """Raises `ValueError` in an encoder-decoder, whose inputs and outputs have no place for two memories."""
        if config.is_encoder_decoder:
            raise ValueError(
                f"stack {self.type!r} carries the memory of one tower; give an encoder-decoder stack 'plain'."
            )

    def build(self, config, **where) -> SegmentRecurrentStack:
        self.refuse_two_towers(config)
        return SegmentRecurrentStack(config, self)
