# SPDX-License-Identifier: Apache-2.0
"""A text that is longer than a segment, cut in segments within one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.call import Call
from ..core.holes import take
from ..ops.common.real_tokens import real_first
from ..position.base import Position


class TextSegments:
    """The states [B, T, D] of a batch of texts as segments of `length` tokens, counted from each row's first real
    token, wherever it is padded.

    Raises:
        ValueError: what cannot be cut: packed rows, prepared masks, or outputs of every layer.
    """

    def __init__(self, hidden_states: Tensor, context: Call, position: Position, length: int) -> None:
        if context.segment_ids is not None or context.explicit_mask is not None:
            raise ValueError(
                f"Rows of {hidden_states.shape[1]} tokens are read in segments of {length}, which packed documents and"
                " prepared masks [B, 1, T, S] do not say how to cut; give one document per row and a mask [B, T]."
            )
        if hidden_states.shape[1] > 1 and (context.output_hidden_states or context.output_attentions):
            raise ValueError(
                f"A text of {hidden_states.shape[1]} tokens is read in segments of {length}, and what every layer gave"
                " is not kept of all of them; give one segment per call, with the `segment_memory` of the one before."
            )
        self.context, self.position, self.length = context, position, length
        self.total, real = hidden_states.shape[1], context.query_padding_mask
        self.order = None if real is None else real_first(real)
        self.states = self._aligned(hidden_states)
        self.real = None if real is None or self.order is None else real.gather(1, self.order)

    def __len__(self) -> int:
        return -(-self.total // self.length)

    def _aligned(self, states: Tensor) -> Tensor:
        """[B, T, ...] with each row's real tokens first."""
        if self.order is None or states.shape[0] != self.order.shape[0]:
            return states
        order = self.order
        return states.gather(1, order.reshape(*order.shape, *[1] * (states.ndim - 2)).expand_as(states))

    def _inputs(self, slots: Tensor) -> dict[str, Any]:
        """What the model is given besides; of what it is given of each token, that of the `slots` [B, t]."""
        return {
            name: take(self._aligned(value), slots)
            if isinstance(value, Tensor) and value.shape[1:2] == (self.total,)
            else value
            for name, value in self.context.inputs.items()
        }

    def single(self) -> Tensor | None:
        """[B], True for rows that have one segment alone; None where no row is padded."""
        return None if self.real is None else self.real.sum(1) <= self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Call]]:
        """States [B, t, D] and context of each segment."""
        given, device = self.context, self.states.device
        for begin in range(0, self.total, self.length):
            part = slice(begin, min(begin + self.length, self.total))
            index = torch.arange(part.stop - begin, device=device)
            context = given.derive(
                padding_mask=None if self.real is None else self.real[:, part],
                positions=self._aligned(given.positions)[:, part],
                query_index=index,
                key_index=index,
                fresh=True,
                inputs=self._inputs((index + begin).expand(len(self.states), -1)),
                inputs_embeds=None,
                position_ids=None,
            )
            states = self.states[:, part]
            self.position.share(context, states)
            yield states, context

    def joined(self, parts: list[Tensor]) -> Tensor:
        """What was made of the segments [B, t, D], each token in its place [B, T, D]."""
        states = torch.cat(parts, dim=1)
        if self.order is None:
            return states
        return states.gather(1, self.order.argsort(1)[..., None].expand_as(states))
