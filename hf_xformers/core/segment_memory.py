# SPDX-License-Identifier: Apache-2.0
"""Segment memory: what a model carries from one segment of a text to the next, next to and apart from the KV cache.

It holds hidden states, not keys and values: they are projected anew in every segment, so that the projections learn
from them, while no gradient reaches the segment that made them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from ..compat import pytree
from ..ops.common.real_tokens import from_first_real, real_last
from .cache import SlotStateLayer
from .call import Call
from .prepared import Prepared, State


class MemoryLayout(Prepared):
    """How a segment memory and the tokens of a call stand side by side.

    Args:
        length: M, slots of the memory.
        real: [B, M + T], which slots are real (None: all).
        order: [B, M + T], in which they stand (None: as they are).
        begun: where a cache continues with a text that follows a memory, which of the call's tokens [B, T] are their
            row's first or stand behind it (None: all); those before are padding, which must not stand between the
            memory and the text.
    """

    length: int = 0
    real: Tensor | None = None
    order: Tensor | None = None
    begun: Tensor | None = None

    @classmethod
    def of(cls, context: Call) -> MemoryLayout:
        """That of a call; a call without memory has one as well."""
        return context.find(cls) or cls()


class StepMemory(State):
    """What a step reads of the memory, [B, M, D], entered as the layer's own input is."""

    states: Tensor


@dataclasses.dataclass
class SegmentMemory:
    """The states that every layer may read of earlier segments.

    states: one [B, M, D] per execution step (the input of that layer), oldest first; empty before the first segment.
    mask: [B, M] boolean, True = a real token; a row's real ones stand last. None: all are real.

    Nothing is changed in place: every method returns a memory that shares what stayed the same.
    """

    states: tuple[Tensor, ...] = ()
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Slots M."""
        return self.states[0].shape[1] if self.states else 0

    @property
    def batch_size(self) -> int | None:
        """Rows B; None while nothing is held."""
        return self.states[0].shape[0] if self.states else None

    def read(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What layers read: one [B, slots, D] per step, and whose slots are real [B, slots] (None: all)."""
        return self.states, self.mask

    def key_order(self, real: Tensor | None, length: int) -> Tensor | None:
        """The order in which the slots of [memory ; segment] are read ([`slot_order`]), [B, slots + T]; None: as they
        stand.
        real: [B, T] boolean, the real tokens of a segment of `length` T, or None (all)."""
        return None if real is None else slot_order(self.mask, self.length, real)

    def update(self, states: Sequence[Tensor], real: Tensor | None, length: int) -> SegmentMemory:
        """The last `length` real tokens of this memory and of a segment that follows it, without gradient.

        states: one [B, T, D] per step; real: [B, T] boolean or None (nothing is padded).
        """
        joined, mask, _ = self.joined(states, real)
        begin = max(joined[0].shape[1] - length, 0)
        return SegmentMemory(tuple(state[:, begin:] for state in joined), None if mask is None else mask[:, begin:])

    def joined(
        self, states: Sequence[Tensor], real: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Memory and segment in one, [B, M + T, D] per step without gradient, real tokens last; their mask, and the
        order [B, M + T] into which they were brought (None: nothing is padded)."""
        new = [state.detach() for state in states]
        if self.states:
            new = [torch.cat([old.to(state.dtype), state], dim=1) for old, state in zip(self.states, new, strict=True)]
        mask = join_masks(self.mask, self.length, real, states[0])
        if mask is None:
            return new, None, None
        order = real_last(mask)
        return [take_slots(state, order) for state in new], mask.gather(1, order), order

    def detach(self) -> SegmentMemory:
        """The same values without gradient."""
        return self._map(torch.Tensor.detach)

    def reset(self, rows: Tensor | None = None) -> SegmentMemory:
        """Forgets everything, or the rows where the boolean `rows` [B] is True: they then read as before the first
        segment."""
        if rows is None:
            return type(self)()
        if not self.states:
            return self
        if rows.dtype != torch.bool or rows.shape != (self.batch_size,):
            raise ValueError(
                f"`rows` must be a boolean tensor [{self.batch_size}], True where a row is to be forgotten, got "
                f"{rows.dtype} {list(rows.shape)}."
            )
        kept = ~rows.to(self.states[0].device)
        changes: dict[str, Any] = {}
        for name, length in self._masks().items():
            mask = getattr(self, name)
            full = kept[:, None].expand(-1, length)
            changes[name] = full if mask is None else mask & full
        return dataclasses.replace(self, **changes)

    def where(self, rows: Tensor, other: SegmentMemory) -> SegmentMemory:
        """This memory in the rows where the boolean `rows` [B] is True, and `other` in the others."""
        if not other.states:
            return self.reset(~rows)
        slots = max(self.length, other.length)
        (own, held), (others, others_held) = self._widened(slots), other._widened(slots)
        states = tuple(torch.where(rows[:, None, None], one, two) for one, two in zip(own, others, strict=True))
        return SegmentMemory(states, torch.where(rows[:, None], held, others_held))

    def _widened(self, slots: int) -> tuple[list[Tensor], Tensor]:
        """States with empty slots before them, [B, slots, D] each, and which are real [B, slots]."""
        missing = slots - self.length
        mask = self.states[0].new_ones(self.states[0].shape[:2], dtype=torch.bool) if self.mask is None else self.mask
        return [F.pad(state, (0, 0, missing, 0)) for state in self.states], F.pad(mask, (missing, 0))

    def _masks(self) -> dict[str, int]:
        """Field name and slots of every mask."""
        return {"mask": self.length}

    def reorder(self, index: Tensor) -> SegmentMemory:
        """Row r becomes row `index[r]`: beams that change places, or a part of the batch."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def __getitem__(self, row: int) -> SegmentMemory:
        """The memory of one row, as a batch of one (pipelines cut an output into rows)."""
        return self._map(lambda tensor: tensor[row : row + 1])

    def repeat_interleave(self, repeats: int) -> SegmentMemory:
        """Every row `repeats` times: one for each beam."""
        return self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, *args: Any, **kwargs: Any) -> SegmentMemory:
        """On another device or in another dtype (masks stay boolean)."""
        dtype_free = {key: value for key, value in kwargs.items() if key != "dtype"}
        free = [argument for argument in args if not isinstance(argument, torch.dtype)]

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.to(*args, **kwargs)
            return tensor.to(*free, **dtype_free) if free or dtype_free else tensor

        return self._map(move)

    def _map(self, function: Callable[[Tensor], Tensor]) -> SegmentMemory:
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                changes[field.name] = tuple(function(tensor) for tensor in value)
            elif value is not None:
                changes[field.name] = function(value)
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by field name, for `torch.save`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> SegmentMemory:
        """The memory that [`SegmentMemory.state_dict`] described."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in state.items()
        }
        return cls(**fields)


def register_memory(cls: type) -> type:
    """Class decorator: lets graphs and exported programs take and return the dataclass as the tensors it holds."""
    names = [field.name for field in dataclasses.fields(cls)]
    pytree.register_pytree_node(
        cls,
        lambda memory: ([getattr(memory, name) for name in names], None),
        lambda values, _: cls(**dict(zip(names, values, strict=True))),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


register_memory(SegmentMemory)


def read_single(given: SegmentMemory | None, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The one state of this shape in a memory, and its mask; None where there is none yet.

    Raises:
        TypeError: something else was given.
        ValueError: other states.
    """
    if given is None:
        return None, None
    if not isinstance(given, SegmentMemory):
        raise TypeError(
            f"`segment_memory` must be the SegmentMemory that this model returned, got {type(given).__name__}."
        )
    if not given.states:
        return None, None
    if len(given.states) != 1 or given.states[0].shape != shape:
        raise ValueError(
            f"`segment_memory` holds {len(given.states)} tensors of {list(given.states[0].shape)}, this call needs one"
            f" of {list(shape)}; give the memory of the same rows and the same model."
        )
    return given.states[0], given.mask


def take_slots(states: Tensor, order: Tensor) -> Tensor:
    """states [B, S, D] in the order [B, S] of slots, which may have been told on another device."""
    return states.gather(1, order.to(states.device).unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def join_masks(first: Tensor | None, length: int, second: Tensor | None, like: Tensor) -> Tensor | None:
    """Masks [B, length] of a memory and [B, T] of a segment `like` [B, T, ...], side by side; None where all are
    real."""
    if first is None and second is None:
        return None
    batch, new = like.shape[:2]
    parts = [
        like.new_ones(batch, count, dtype=torch.bool) if mask is None else mask
        for mask, count in ((first, length), (second, new))
    ]
    return torch.cat(parts, dim=1)


def slot_order(mask: Tensor | None, slots: int, real: Tensor) -> Tensor:
    """Where the keys of [memory ; segment] stand, [B, slots + T]: empty slots of the memory and padding at the left of
    the segment come first, so that the distance between two real tokens is that of their slots.

    mask: [B, slots] boolean or None (all are real); real: [B, T] boolean, the segment's real tokens.
    """
    inside = from_first_real(real)
    held = inside.new_ones(inside.shape[0], slots) if mask is None else mask
    return real_last(torch.cat([held, inside], dim=1))


@dataclasses.dataclass
class CompressiveMemory(SegmentMemory):
    """Two levels: the states of recent tokens, and before them what older ones were compressed to.

    compressed: one [B, C, D] per execution step, oldest first; compressed_mask: [B, C] or None. usage: one [B, M] per
    step, the attention that each state has received so far; empty where it is not counted.
    """

    compressed: tuple[Tensor, ...] = ()
    compressed_mask: Tensor | None = None
    usage: tuple[Tensor, ...] = ()

    @property
    def compressed_length(self) -> int:
        """Compressed slots C."""
        return self.compressed[0].shape[1] if self.compressed else 0

    def read(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not self.compressed:
            return self.states, self.mask
        states = tuple(torch.cat(pair, dim=1) for pair in zip(self.compressed, self.states, strict=True))
        return states, join_masks(self.compressed_mask, self.compressed_length, self.mask, self.states[0])

    def key_order(self, real: Tensor | None, length: int) -> Tensor | None:
        # Rows have compressed different numbers of states, so empty slots may stand between the two levels.
        states, mask = self.read()
        if real is None and mask is not None:
            real = mask.new_ones(mask.shape[0], length)
        return None if real is None else slot_order(mask, states[0].shape[1], real)

    def _masks(self) -> dict[str, int]:
        masks = {"mask": self.length}
        return {**masks, "compressed_mask": self.compressed_length} if self.compressed else masks

    def evict(
        self, states: Sequence[Tensor], real: Tensor | None, keep: int, rate: int, received: Sequence[Tensor] = ()
    ) -> tuple[CompressiveMemory, CompressiveMemory]:
        """This memory after a segment, whose oldest states give way so that each row has at least `keep` (or all it
        has) and fewer than `keep + rate`; and the evicted ones, per row a multiple of `rate`, the last ones real.

        received: one [B, M + T] per step, the attention that states received from the segment.
        """
        joined, mask, order = self.joined(states, real)
        total, device = joined[0].shape[1], joined[0].device
        count = max(total - keep, 0) // rate * rate
        usage = [new.clone() for new in received]
        for old, new in zip(self.usage, usage, strict=False):
            new[:, : old.shape[1]] += old
        if mask is None or order is None:
            parts = (
                CompressiveMemory(tuple(x[:, count:] for x in joined), usage=tuple(x[:, count:] for x in usage)),
                CompressiveMemory(tuple(x[:, :count] for x in joined), usage=tuple(x[:, :count] for x in usage)),
            )
        else:
            usage = [new.gather(1, order) for new in usage]
            number = mask.sum(1, keepdim=True)
            gone = (number - keep).clamp(min=0) // rate * rate
            first = total - number + gone  # the first that stays
            begin = max(total - keep - rate + 1, 0)
            kept_mask = (torch.arange(total, device=device) >= first)[:, begin:]
            place = torch.arange(count, device=device)
            source = (first - count + place).clamp(min=0)
            parts = (
                CompressiveMemory(
                    tuple(x[:, begin:] for x in joined), kept_mask, usage=tuple(x[:, begin:] for x in usage)
                ),
                CompressiveMemory(
                    tuple(take_slots(x, source) for x in joined),
                    place >= count - gone,
                    usage=tuple(x.gather(1, source) for x in usage),
                ),
            )
        kept = dataclasses.replace(parts[0], compressed=self.compressed, compressed_mask=self.compressed_mask)
        return kept, parts[1]

    def push(self, slots: Sequence[Tensor], mask: Tensor | None, length: int) -> CompressiveMemory:
        """With newly compressed slots, one [B, n, D] per step of which `mask` [B, n] are real, after the older ones;
        the last `length` are kept."""
        older = SegmentMemory(self.compressed, self.compressed_mask).update(slots, mask, length)
        return dataclasses.replace(self, compressed=older.states, compressed_mask=older.mask)


register_memory(CompressiveMemory)


class SegmentCacheLayer(DynamicLayer):
    """Keys and values of the last `limit` tokens (None: of all), and which of them are real.

    A segment memory that precedes a generated text is stored before it; it does not count as cached tokens.
    """

    is_croppable = False
    derived = ("relative",)  # made of distances and weights alone: no state of a text

    def __init__(self, limit: int | None = None):
        super().__init__()
        self.limit = limit
        self.real: Tensor | None = None
        self.relative: Tensor | None = None  # what the mechanism made of distances; does not depend on the batch
        self.cumulative_length = 0
        self.follows_memory = False  # whether states of a memory were stored before the text

    def extend(
        self, keys: Tensor, values: Tensor, real: Tensor | None, tokens: int, begun: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """keys and values [B, K, n, d] of new slots, `tokens` of them tokens of the text, and which are real [B, n]
        (None: all) -> keys, values and mask of all slots, the stored ones first, but for padding before the first
        token of a row: `begun` [B, n] is False for it (None: there is none), and it goes before all others."""
        stored = self.keys.shape[-2] if self.is_initialized and self.keys is not None else 0
        self.follows_memory = self.follows_memory or keys.shape[-2] > tokens
        real = join_masks(self.real, stored, real, keys[:, 0])
        keys, values = super().update(keys, values)
        if begun is not None:
            order = real_last(F.pad(begun, (stored, 0), value=True))
            keys, values = (x.gather(2, order[:, None, :, None].expand_as(x)) for x in (keys, values))
            real = None if real is None else real.gather(1, order)
            self.keys, self.values = keys, values
        self.real = real
        self.cumulative_length += tokens
        excess = 0 if self.limit is None else max(keys.shape[-2] - self.limit, 0)
        if excess:
            self.keys, self.values = keys[:, :, excess:], values[:, :, excess:]
            self.real = None if real is None else real[:, excess:]
        return keys, values, real

    @property
    def stored(self) -> int:
        """Slots that are held."""
        if not self.is_initialized or self.keys is None or not self.keys.numel():
            return 0
        return self.keys.shape[-2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, _ = self.extend(key_states, value_states, None, key_states.shape[-2])
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.real, self.relative, self.cumulative_length, self.follows_memory = None, None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "A memory of the last tokens cannot bring back what it dropped; decode without an assistant model."
            )

    def _rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.stored and self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)
            self.real = None if self.real is None else function(self.real)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rows(lambda tensor: tensor[indices])


class MemoryCacheLayer(SlotStateLayer):
    """A generation cache that is a segment memory: each call is a segment. The first layer holds it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: SegmentMemory | None = None

    def reset(self) -> None:
        super().reset()
        self.memory = None

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._map(function)
        if self.memory is not None:
            self.memory = self.memory._map(function)
