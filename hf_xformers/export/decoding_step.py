# SPDX-License-Identifier: Apache-2.0
"""What a step of a decoder is as a graph, and how states go in and out of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .state import StepState

States = list[Tensor]


@dataclass(frozen=True)
class DecodingStep:
    """A step of a decoder under torch.export.

    Args:
        program: the graph of (token [B, 1], attention_mask [B, tokens with this one], states) -> (logits [B, V],
            states after it, but for those of the memory, which stay); `torch.export.save` stores it.
        states: what each state is, in this order.
        settled: places of padding before every text.
        begin: the states of such padding alone, for one text; in an encoder-decoder those that are not of the memory.
        difference: largest absolute difference to the model on texts of several batches and lengths.
        opening: of an encoder-decoder, the graph of (input_ids [B, S], attention_mask [B, S]) -> the states before the
            first token.
    """

    program: torch.export.ExportedProgram
    states: tuple[StepState, ...]
    settled: int
    begin: tuple[Tensor, ...]
    difference: float
    opening: torch.export.ExportedProgram | None = None

    def start(self, batch: int = 1) -> States:
        """The states before the first token of so many texts.

        Raises:
            ValueError: in an encoder-decoder these depend on what its encoder reads.
        """
        if self.opening is not None:
            raise ValueError("the states of an encoder-decoder begin with a text for its encoder; take `start_on`.")
        return for_rows(self.states, self.begin, batch)

    def start_on(self, input_ids: Tensor, attention_mask: Tensor) -> States:
        """The states before the first token, of the texts [B, S] that an encoder reads.

        Raises:
            ValueError: the model has no encoder.
        """
        if self._open is None:
            raise ValueError(
                "a model with one tower has no encoder to read a text before the first token; take `start`."
            )
        return list(self._open(input_ids, attention_mask))

    def __call__(self, token: Tensor, attention_mask: Tensor, states: States) -> tuple[Tensor, States]:
        logits, changed = self._run(token, attention_mask, states)
        return logits, after_step(self.states, states, changed)

    @functools.cached_property
    def _run(self) -> nn.Module:
        return self.program.module()

    @functools.cached_property
    def _open(self) -> nn.Module | None:
        return None if self.opening is None else self.opening.module()


@dataclass(frozen=True)
class StepReport:
    """
    Args:
        path: the graph.
        start: the file of the states before the first token (safetensors, for one text; they are repeated along the
            rows' axis for more), or the graph that makes them of a text for the encoder, `input_ids` and
            `attention_mask` [B, S], each by its name.
        states: what each of them is. The graph reads `input_ids` [B, 1], `attention_mask` [B, tokens] (with an encoder
            before it `decoder_input_ids` and `decoder_attention_mask`) and every state by its name, and gives `logits`
            [B, V] and each state that is not of the memory as `next.` and its name.
        settled: places of padding before every text.
        literal: whether attention is exported as its literal equation.
        difference: largest absolute difference to the model under onnxruntime; None where that is not installed.
    """

    path: str
    start: str
    states: tuple[StepState, ...]
    settled: int
    literal: bool
    difference: float | None


def after_step(kinds: Sequence[StepState], before: States, changed: States) -> States:
    """The states after a step: those that it has changed, and those of the memory as they were."""
    new = iter(changed)
    return [old if kind.of_memory else next(new) for kind, old in zip(kinds, before, strict=True)]


def for_rows(states: Sequence[StepState], begin: Sequence[Tensor], batch: int) -> States:
    """States of one text -> of `batch` texts."""
    return [
        x.clone() if state.axis is None else x.repeat_interleave(batch, dim=state.axis)
        for state, x in zip(states, begin)
    ]
