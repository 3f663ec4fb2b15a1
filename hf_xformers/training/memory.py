# SPDX-License-Identifier: Apache-2.0
"""What a run takes in memory before it reads anything: said where that matters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

_WORTH_A_LINE = 100e6  # bytes
_ADAMW = "adamw_torch"  # keeps two numbers of each trained one


def bytes_of(modules: Iterable[nn.Module]) -> int:
    """Of all weights, those that several modules share once."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            for part in _plain(tensor):
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own of which one is made: of a sharded one that of this process, of a quantized
    one numbers and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):  # and no mesh of devices
            yield from _plain(part)


def memory_line(model: nn.Module, beside: Iterable[nn.Module], optimizer: str) -> str | None:
    """The bytes of weights (of `model` and of models `beside` it), gradients and optimizer states, as a line for
    people; None where they are few. optimizer: as Trainer's `optim` names it."""
    beside = list(beside)
    weights = bytes_of([model, *beside])
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if weights + trained < _WORTH_A_LINE:
        return None
    whose = " with the teacher's" if beside else ""
    known = optimizer in (_ADAMW, f"{_ADAMW}_fused")
    states, also = (
        (f" and Adam's states {_size(3 * trained)}", "") if known else (f" {_size(trained)}", " optimizer states and")
    )
    return f"memory: weights{whose} {_size(weights)}, gradients{states};{also} activations come on top"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


class MemoryLine(TrainerCallback):
    """Prints [`memory_line`] before the first step of a Trainer, whose `models_beside`, if any, are a teacher's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        beside = getattr(self.trainer, "models_beside", ())
        line = memory_line(self.trainer.model, beside, str(getattr(args.optim, "value", args.optim)))
        if line is not None and state.is_local_process_zero:
            print(line, flush=True)
