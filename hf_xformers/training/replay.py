# SPDX-License-Identifier: Apache-2.0
"""Memory replay back-propagation: gradients through many segments of a text, with the activations of one.

Wu et al. 2022 (Memformer, arXiv 2010.06891, section 3.6, algorithm 1): all segments are read once without a graph, and
only the memories between them are kept. Then the segments are read again, the last first; the gradient with respect to
the memory that a segment began with is handed to the segment before it. The result is the gradient of back-propagation
through time. Dropout draws the same numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..core.segment_memory import SegmentMemory
from .segments import SEGMENT_MEMORY, SegmentCarrier


@dataclass(frozen=True)
class RandomState:
    """torch's generators of the processor and of all CUDA devices."""

    processor: Tensor
    devices: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all()) if used else ())

    def restore(self) -> None:
        torch.set_rng_state(self.processor)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


def leaf(memory: SegmentMemory | None) -> SegmentMemory | None:
    """The memory with states that a backward pass gives gradients to."""
    if memory is None:
        return None
    return memory._map(lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)


def gradients(memory: SegmentMemory | None) -> tuple[Tensor, ...] | None:
    """What the states of a [`leaf`] have received; None where nobody read it."""
    if memory is None:
        return None
    return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in memory.states)


def surrogate(memory: SegmentMemory, slopes: tuple[Tensor, ...] | None, scale: float = 1.0) -> Tensor | float:
    """A number whose value is 0 and whose gradient with respect to `memory` is `slopes` * scale."""
    if slopes is None:
        return 0.0
    total: Tensor | float = 0.0
    for state, slope in zip(memory.states, slopes, strict=True):
        product = (state * (slope * scale)).sum()
        total = total + (product - product.detach())
    return total


@runtime_checkable
class ReplaysMemory(Protocol):
    """A stack through whose segment memory gradients go to the segments before."""

    def replays(self) -> bool:
        """Whether `XFormerTrainer` replays memories, where they can be."""


def check_replay(model: nn.Module) -> None:
    """Raises `ValueError` for a model whose memory has no gradient."""
    stack = getattr(getattr(model, "config", None), "stack", None)
    if not isinstance(stack, ReplaysMemory):
        raise ValueError(
            "Memory replay goes back through the memory of a text's segments, and that of stack"
            f" {getattr(stack, 'type', None)!r} has no gradient; train it with one backward pass per segment, or use"
            " xf_memformer."
        )


def replay_backward(
    model: nn.Module,
    segments: Sequence[Mapping[str, Any]],
    memory: SegmentMemory | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
) -> tuple[list[Tensor], SegmentMemory | None]:
    """Adds to the parameters' `grad` the gradient of the sum of the segments' losses.

    segments: the model's inputs for each segment in order, labels included; memory: what the text begins with. loss:
    from a model's output (default: its `loss`). Returns the segments' losses and the memory after the last one, both
    without gradient.

    Raises:
        ValueError: no segments, or a model whose memory has no gradient.
    """
    check_replay(model)
    if not segments:
        raise ValueError("`segments` is empty; give the inputs of one segment at least.")
    replay, losses = Replay(), []
    replay.begin(segments)
    replay.read_ahead(lambda inputs, begin: model(**inputs, segment_memory=begin).segment_memory.detach(), memory)
    for _ in segments:
        inputs, begin = replay.next()
        output = model(**inputs, segment_memory=begin)
        value = output.loss if loss is None else loss(output)
        (value + surrogate(output.segment_memory, replay.slopes)).backward()
        memory = replay.done()
        losses.append(value.detach())
    return losses[::-1], memory


class Replay:
    """Memory replay over consecutive batches, such as the micro-batches of an optimizer's step.

    `ahead`: the batches that are still to be replayed, the next one last.
    """

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.ahead: list[tuple[Any, RandomState, SegmentMemory | None]] = []
        self.slopes: tuple[Tensor, ...] | None = None
        self.current: SegmentMemory | None = None
        self.final: tuple[SegmentMemory | None, RandomState] | None = None

    def begin(self, batches: Sequence[Any]) -> None:
        """The batches of the next step."""
        self.batches = list(batches)
        self.ahead, self.slopes, self.final = [], None, None

    @property
    def active(self) -> bool:
        return bool(self.batches)

    def read_ahead(
        self, read: Callable[[Any, SegmentMemory | None], SegmentMemory], memory: SegmentMemory | None
    ) -> None:
        """Reads all batches without a graph, if that is still to be done. read: a batch and the memory that it begins
        with -> the memory after it."""
        if self.ahead or self.final is not None:
            return
        with torch.no_grad():
            for batch in self.batches:
                self.ahead.append((batch, RandomState.now(), memory))
                memory = read(batch, memory)
        self.final = memory, RandomState.now()

    def next(self) -> tuple[Any, SegmentMemory | None]:
        """The batch to replay, and the memory that it begins with."""
        batch, state, memory = self.ahead.pop()
        state.restore()
        self.current = leaf(memory)
        return batch, self.current

    def done(self) -> SegmentMemory | None:
        """After a backward pass: takes its gradient on; the memory at the end of the step, after its last one."""
        self.slopes, self.current = gradients(self.current), None
        if self.ahead or self.final is None:
            return None
        memory, state = self.final
        state.restore()
        self.batches = []
        return memory


class ReplayedSegments(SegmentCarrier):
    """Carries a memory with gradients: a step of several micro-batches, which are consecutive segments, learns through
    all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()

    def begin(self, batches: Sequence[Any]) -> None:
        self.replay.begin(batches if len(batches) > 1 else [])

    def step(self, learn: Callable[[Any], Tensor], read: Callable[[Any], None], batch: Any) -> Tensor:
        """The last micro-batch first, from the memory that it began with."""
        if not self.replay.active:
            return learn(batch)

        def memory_after(batch: Any, memory: SegmentMemory | None) -> Any:
            self.training = memory
            read(batch)
            return self.training

        self.replay.read_ahead(memory_after, self.training)
        batch, self.training = self.replay.next()
        loss = learn(batch)
        memory = self.replay.done()
        if memory is not None:
            self.training = memory
        return loss

    def loss(self, loss: Tensor, outputs: Any, scale: Callable[[], float]) -> Tensor:
        if not self.replay.active:
            return loss
        return loss + surrogate(outputs[SEGMENT_MEMORY], self.replay.slopes, scale())


def carrier_of(config: Any) -> SegmentCarrier:
    """What carries the memory of models with this configuration."""
    stack = getattr(config, "stack", None)
    return ReplayedSegments() if isinstance(stack, ReplaysMemory) and stack.replays() else SegmentCarrier()
