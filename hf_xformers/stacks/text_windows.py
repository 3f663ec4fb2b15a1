# SPDX-License-Identifier: Apache-2.0
"""Where each text of a batch stands in its current window, what it carries from the last one, and the generation cache
of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from ..core.cache import FollowsRows
from ..core.call import Call
from ..core.call_features import CallFeature
from ..core.segment_memory import take_slots
from ..position.base import Position
from .text_segments import TextSegments


@dataclass(frozen=True)
class RestartingPositions(CallFeature):
    """Positions begin anew with each window of `after` tokens; documents do not."""

    after: int

    def positions(self, positions: Tensor) -> Tensor:
        return positions % self.after


@dataclass
class Windows:
    """One window of `length` tokens of every row, as it is being read.

    Args:
        place: [B], real tokens read of it.
        pooled: [B, D], the sum of their states, or the last one, in float32 at least.
        carried: [B, D], what the window before has left.
        held: [B], whether there was one.
    """

    place: Tensor
    pooled: Tensor
    carried: Tensor
    held: Tensor

    @classmethod
    def begin(cls, like: Tensor, carried: Tensor | None = None, held: Tensor | None = None) -> Windows:
        """The first window of texts `like` [B, T, D], after what they may begin with."""
        rows, width = like.shape[0], like.shape[-1]
        if held is None:
            held = like.new_full((rows,), carried is not None, dtype=torch.bool)
        wide = torch.promote_types(like.dtype, torch.float32)
        empty = like.new_zeros(rows, width, dtype=wide)
        return cls(held.new_zeros(rows, dtype=torch.long), empty, empty if carried is None else carried.to(wide), held)

    def left(self, mean: bool) -> Tensor:
        """[B, D]: what the window leaves to the next one, where it has tokens."""
        return self.pooled / self.place.clamp(min=1)[:, None] if mean else self.pooled

    def rolled(self, full: Tensor, mean: bool) -> Windows:
        """The next window in the rows where `full` [B] is True, and the same in the others."""
        return Windows(
            self.place.masked_fill(full, 0),
            self.pooled.masked_fill(full[:, None], 0.0),
            torch.where(full[:, None], self.left(mean), self.carried),
            self.held | full,
        )

    def with_tokens(self, states: Tensor, real: Tensor | None, mean: bool) -> Windows:
        """After more tokens [B, t, D] of the window, of which `real` [B, t] (None: all) are tokens."""
        wide = states.to(self.pooled.dtype)
        if real is None:
            pooled, count = (self.pooled + wide.sum(1), states.shape[1]) if mean else (wide[:, -1], states.shape[1])
            return replace(self, place=self.place + count, pooled=pooled)
        if mean:
            pooled = self.pooled + (wide * real[..., None]).sum(1)
        else:
            last = torch.where(real, torch.arange(real.shape[1], device=real.device), 0).amax(1)
            found = wide.gather(1, last[:, None, None].expand(-1, 1, wide.shape[-1]))[:, 0]
            pooled = torch.where(real.any(1)[:, None], found, self.pooled)
        return replace(self, place=self.place + real.sum(1), pooled=pooled)

    def map(self, function: Callable[[Tensor], Tensor]) -> Windows:
        return Windows(*(function(getattr(self, field.name)) for field in fields(self)))


class WindowCacheLayer(FollowsRows, DynamicLayer):
    """Keys and values of each row's current window, the newest tokens last.

    The first layer also holds which of the slots are real tokens of that window, [B, S], and the [`Windows`].
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.real: Tensor | None = None
        self.windows: Windows | None = None
        self.cumulative_length = 0

    @property
    def stored(self) -> int:
        """Slots S that are held."""
        return 0 if self.keys is None or not self.keys.numel() else self.keys.shape[-2]

    def keep(self, slots: int, order: Tensor | None) -> None:
        """Drops all but the last `slots` slots, in the `order` [B, S] (None: as they stand)."""
        if self.keys is None or self.values is None:
            return
        if order is not None:
            heads, width = self.keys.shape[1], self.keys.shape[-1]
            self.keys = take_slots(self.keys.transpose(1, 2).flatten(2), order).unflatten(-1, (heads, width))
            self.values = take_slots(self.values.transpose(1, 2).flatten(2), order).unflatten(-1, (heads, -1))
            self.keys, self.values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        begin = max(self.keys.shape[-2] - slots, 0)
        self.keys, self.values = self.keys[:, :, begin:], self.values[:, :, begin:]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]  # a layer that has seen nothing

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "A window that has ended cannot be opened again; decode without an assistant model (which drops"
                " tokens)."
            )

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.real = None if self.real is None else function(self.real)
        self.windows = None if self.windows is None else self.windows.map(function)


class ContinuedText(TextSegments):
    """Texts that continue in windows of which `place` [B] tokens are read: a row's first segment is what is left of
    its window, the following ones are windows."""

    def __init__(self, hidden_states: Tensor, context: Call, position: Position, length: int, place: Tensor) -> None:
        super().__init__(hidden_states, context, position, length)
        self.place = place
        self.slots: list[Tensor] = []

    def __len__(self) -> int:
        return (self.length - 1 + self.total - 1) // self.length + 1  # the window may want one token

    def __iter__(self) -> Iterator[tuple[Tensor, Call]]:
        column = torch.arange(min(self.length, self.total), device=self.place.device)
        number = self.total if self.real is None else self.real.sum(1, keepdim=True)
        self.slots = []
        for window in range(len(self)):
            begin = (window * self.length - self.place).clamp(min=0)[:, None]
            stop = (window + 1) * self.length - self.place[:, None]
            slots = begin + column
            real = (slots < stop) & (slots < number)
            slots = slots.clamp(max=self.total - 1)
            self.slots.append(torch.where(real, slots, self.total))
            states = take_slots(self.states, slots)
            positions = self._aligned(self.context.positions).expand(len(slots), -1).gather(1, slots)
            context = self.context.derive(
                padding_mask=real,
                positions=positions,
                query_index=column,
                key_index=column,
                fresh=True,
                inputs=self._inputs(slots),
                inputs_embeds=None,
                position_ids=None,
            )
            self.position.share_rotations(context, states)
            yield states, context

    def joined(self, parts: list[Tensor]) -> Tensor:
        states = torch.cat(parts, dim=1)
        place = torch.cat(self.slots, dim=1)  # of each state in its row; behind all for those of no token
        room = F.pad(torch.zeros_like(self.states), (0, 0, 0, 1))
        states = room.scatter(1, place[..., None].expand_as(states), states)[:, : self.total]
        return states if self.order is None else take_slots(states, self.order.argsort(1))
