"""Trainer callbacks of pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers.trainer_callback import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import TrainingArguments

from ..objectives.base import SeededCollator

__all__ = ["EpochCallback", "ExactSaves", "LogLines", "LogLinesUnderBar", "speak_plainly"]


class ExactSaves(TrainerCallback):
    """Makes checkpoints from which a resumed run writes the same log as one that was never interrupted.

    - The loss is logged at every step that is saved: the losses since the last log are in memory only.
    - A save at the last step of an epoch waits for what belongs to the end of the epoch, such as its evaluation, which
      a resumed run would not do again.
    """

    def __init__(self) -> None:
        self._waiting = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._log_first(args, control)
        if control.should_save and state.epoch is not None and state.epoch == int(state.epoch):
            control.should_save, self._waiting = False, True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._waiting:
            control.should_save, self._waiting = True, False
        self._log_first(args, control)
        return control

    @staticmethod
    def _log_first(args: TrainingArguments, control: TrainerControl) -> None:
        saves = control.should_save or (control.should_evaluate and args.save_strategy == SaveStrategy.BEST)
        if saves and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True


class EpochCallback(TrainerCallback):
    """Calls `collator.set_epoch(epoch)` before each training epoch, also after a resume: masking becomes dynamic.

    Give `Trainer` the same collator. Evaluation during training then sees the noise of the current epoch; for noise
    that never changes give the evaluation loader `collator.as_static()`.
    """

    def __init__(self, collator: SeededCollator) -> None:
        self.collator = collator
        self._next = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # state.epoch is a fraction that only restarts training; a dataset without length never reaches the next
        # integer, so from here on epochs are counted.
        self._next = int(state.epoch or 0)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.collator.set_epoch(self._next)
        self._next += 1


# Held-out figures that a line leaves out: they follow from another one, or say how fast the machine is.
_NOT_SHOWN = ("perplexity", "tokens", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def log_line(logs: dict[str, Any], state: TrainerState, called: Mapping[str, str] | None = None) -> str:
    """What Trainer logged, as a line for people: held-out figures (loss and accuracy first, then a task's others), by
    the names that they are `called`, beside the floor, what token frequencies alone reach."""
    names = called or {}
    parts = [f"step {state.global_step}/{state.max_steps}"]
    held_out = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    if held_out:
        others = [name for name in held_out if name not in _NOT_SHOWN and not name.startswith(("floor_", "aux_"))]
        figures = []
        for name in dict.fromkeys(("loss", "accuracy", *others)):
            form = ".1%" if name.endswith("accuracy") else {"loss": ".3f"}.get(name, ".4g")
            value, floor = held_out.get(name), held_out.get(f"floor_{name}")
            beside = "" if floor is None else f" (floor {floor:{form}})"
            figures += [] if value is None else [f"{names.get(name, name.replace('_', ' '))} {value:{form}}{beside}"]
        parts.append(f"held out: {', '.join(figures)}" if figures else "held out")
        prefix = "eval_"
    elif "train_runtime" in logs:
        parts.append(f"done in {logs['train_runtime']:.0f} s")
        prefix = None
    else:
        shown = {"loss": ".3f", "learning_rate": ".2g", "epoch": ".2f"}
        parts += [f"{name.replace('_', ' ')} {logs[name]:{form}}" for name, form in shown.items() if name in logs]
        prefix = ""
    aux = {} if prefix is None else {k: v for k, v in logs.items() if k.startswith(f"{prefix}aux_")}
    parts += [f"{name.removeprefix(f'{prefix}aux_')} {value:.3g}" for name, value in aux.items()]
    return ", ".join(parts)


class LogLines(PrinterCallback):
    """Prints [`log_line`] where Trainer prints a dict."""

    called: Mapping[str, str] = MappingProxyType({})

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs:
            print(log_line(logs, state, self.called), flush=True)


class LogLinesUnderBar(ProgressCallback):
    """The same above a progress bar."""

    called: Mapping[str, str] = MappingProxyType({})

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(log_line(logs, state, self.called))


def speak_plainly(trainer: Any, called: Mapping[str, str] | None = None) -> None:
    """Puts lines for people in place of the dicts that a Trainer prints. called: held-out figures by the names that
    say more."""
    for theirs, ours in ((PrinterCallback, LogLines), (ProgressCallback, LogLinesUnderBar)):
        if trainer.pop_callback(theirs) is not None:
            line = ours()
            line.called = called or {}
            trainer.add_callback(line)
