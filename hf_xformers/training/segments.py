# SPDX-License-Identifier: Apache-2.0
"""Training on long texts segment by segment: rows in contiguous streams, and a memory carried from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_callback import TrainerCallback

from ..core.segment_memory import SegmentMemory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The input and output of models that have one.
SEGMENT_MEMORY = "segment_memory"
# A boolean column, True where a row begins a text that does not continue the row before it in its stream.
SEGMENT_START = "segment_start"


def has_segment_memory(config: PreTrainedConfig) -> bool:
    """Whether models of a configuration read and return a segment memory."""
    return SEGMENT_MEMORY in getattr(getattr(config, "stack", None), "inputs", ())


def choose_streams(wanted: bool | None, config: PreTrainedConfig, shape: str, *, streaming: bool = False) -> bool:
    """Whether a run reads its rows in streams: as `wanted`; None: where the model has a segment memory, is a causal
    decoder and the data is not streamed.

    shape: of the model, as the objective names it. Raises ValueError where the wanted streams cannot be.
    """
    able = has_segment_memory(config)
    if wanted is None:
        return able and shape == "decoder" and not streaming
    if wanted and not able:
        raise ValueError(
            f"--segment_streams carries a segment memory from row to row, and {config.model_type!r} with stack"
            f" {getattr(getattr(config, 'stack', None), 'type', 'plain')!r} has none; leave it out, or take a variant"
            f" that has one: {', '.join(_variants_with_memory())}"
        )
    if wanted and streaming:
        raise ValueError(
            "--segment_streams cuts the rows into contiguous streams, and --streaming does not know how many there"
            " are; leave one of them out"
        )
    return wanted


def _variants_with_memory() -> list[str]:
    from ..core.changes import components_of
    from ..core.components import build_spec
    from ..variants import config_class, model_types

    stacks = {name: build_spec("stack", components_of(config_class(name))["stack"]) for name in model_types()}
    return [name for name, stack in stacks.items() if SEGMENT_MEMORY in stack.inputs]


class StreamSampler(Sampler[int]):
    """The order in which a corpus of consecutive rows is `streams` texts that are read side by side.

    The rows are cut into `streams` contiguous stretches; the t-th batch of `streams` rows holds the t-th row of each,
    so that every row continues the one in the same place of the batch before.

    rows: number of rows; streams: rows of a batch over all processes; keep_all: let the first stretches be a row
    longer where the rows do not divide, which makes the last batch smaller (evaluation); else the rows left over are
    not used.

    Raises:
        ValueError: fewer rows than streams, with `keep_all=False`.
    """

    def __init__(self, rows: int, streams: int, keep_all: bool = False):
        if rows < streams and not keep_all:
            raise ValueError(
                f"{rows} rows cannot be laid out in {streams} streams, one for each row of a batch; take a smaller"
                " batch, or more text."
            )
        self.streams = streams
        self.length, self.extra = divmod(rows, streams)
        if not keep_all:
            self.extra = 0

    def __len__(self) -> int:
        return self.length * self.streams + self.extra

    def __iter__(self) -> Iterator[int]:
        starts = [stream * self.length + min(stream, self.extra) for stream in range(self.streams)]
        for time in range(self.length):
            for start in starts:
                yield start + time
        for start in starts[: self.extra]:
            yield start + self.length


class SegmentCarrier(TrainerCallback):
    """The memory of training and that of evaluation, each from one batch to the next.

    Training begins every epoch without one; evaluation begins without one. Where the batch has a column
    `segment_start` [B], the rows that it marks forget theirs first.
    """

    def __init__(self) -> None:
        self.training: SegmentMemory | None = None
        self.evaluation: SegmentMemory | None = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = None

    def enter(self, inputs: dict[str, Any], training: bool) -> dict[str, Any]:
        """The inputs of a batch with the memory that its rows continue."""
        inputs = dict(inputs)
        starts: Tensor | None = inputs.pop(SEGMENT_START, None)
        memory = self.training if training else self.evaluation
        if memory is None or not memory.states:
            return inputs
        rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim > 1)
        if rows < (memory.batch_size or 0):  # the last batch of an evaluation
            memory = memory.reorder(torch.arange(rows))
        if starts is not None:
            memory = memory.reset(starts.bool())
        return {**inputs, SEGMENT_MEMORY: memory}

    def leave(self, outputs: Any, training: bool) -> None:
        """Keeps what a batch leaves to the next one. Raises `ValueError` for a model without segment memory."""
        memory = outputs.get(SEGMENT_MEMORY) if isinstance(outputs, dict) else None
        if memory is None:
            raise ValueError(
                "`segment_streams=True` carries a segment memory, which this model's outputs do not have; train a"
                " model with stack 'segment_recurrent' (e.g. xf_transformer_xl), or leave it out."
            )
        if training:
            self.training = memory.detach()
        else:
            self.evaluation = memory.detach()

    def begin(self, batches: Sequence[Any]) -> None:
        """The micro-batches of the next step."""

    def step(self, learn: Callable[[Any], Tensor], read: Callable[[Any], None], batch: Any) -> Tensor:
        """A micro-batch of a step: its loss. learn: reads a batch and its gradients; read: reads it without them."""
        return learn(batch)

    def loss(self, loss: Tensor, outputs: Any, scale: Callable[[], float]) -> Tensor:
        """The loss of a training batch with what earlier batches learn of it. scale: of a gradient that backward
        passes scale as they do a loss."""
        return loss

    @staticmethod
    def file(folder: str | Path, rank: int) -> Path:
        """Where a process keeps its memory in a checkpoint."""
        return Path(folder) / f"segment_memory_{rank}.pt"

    def save(self, folder: str | Path, rank: int) -> None:
        if self.training is not None:
            state = {"kind": type(self.training).__name__, **self.training.state_dict()}
            torch.save(state, self.file(folder, rank))

    def load(self, folder: str | Path, rank: int, device: torch.device) -> None:
        """Raises `ValueError` for a memory of a kind that does not exist."""
        path = self.file(folder, rank)
        if not path.is_file():
            return
        place = "cpu" if device.type == "cpu" else device  # not "cpu:0", which a process of several is given
        state = torch.load(path, map_location=place, weights_only=True)
        name = state.pop("kind")
        classes: list[type[SegmentMemory]] = [SegmentMemory, *SegmentMemory.__subclasses__()]
        kinds = {kind.__name__: kind for kind in classes}
        if name not in kinds:
            raise ValueError(f"{str(path)!r} holds a {name}, which is no segment memory of this package.")
        self.training = kinds[name].from_state_dict(state)
