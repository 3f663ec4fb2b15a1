# SPDX-License-Identifier: Apache-2.0
"""Trainer callbacks of pretraining."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers.trainer_callback import (
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import TrainingArguments

from ..objectives.base import SeededCollator
from .memory import MemoryLine

_SECONDS_BETWEEN = 10.0  # two lines about the progress of what is not trained


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


class TrainedSeconds(TrainerCallback, ExportableState):
    """How long a run has trained, in all its processes one after the other: checkpoints hold the seconds up to them,
    from which a resumed run counts on. What an interruption lost is not counted."""

    def __init__(self) -> None:
        self.before, self._started = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._started

    def resume(self, state: TrainerState) -> None:
        """Counts on from what a checkpoint says, from now on."""
        saved: dict[str, Any] = state.stateful_callbacks.get(type(self).__name__) or {}  # type: ignore[union-attr]
        self.before = float(saved.get("attributes", {}).get("before", 0.0))
        self._started = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:
            self.resume(state)
        else:
            self.before, self._started = 0.0, time.perf_counter()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"before": round(self.seconds, 2)}}


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
    the names that they are `called`, next to the baseline, what token frequencies alone reach."""
    names = called or {}
    parts = [f"step {state.global_step}/{state.max_steps}"]
    held_out = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    if held_out:
        others = [name for name in held_out if name not in _NOT_SHOWN and not name.startswith(("baseline_", "aux_"))]
        figures = []
        for name in dict.fromkeys(("loss", "accuracy", *others)):
            form = ".1%" if name.endswith("accuracy") else {"loss": ".3f"}.get(name, ".4g")
            value, baseline = held_out.get(name), held_out.get(f"baseline_{name}")
            beside = "" if baseline is None else f" (baseline {baseline:{form}})"
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


class Progress:
    """Lines about how far something of `count` parts is, and how long it will take, one in ten seconds at most, to
    `say`."""

    def __init__(self, what: str, count: int | None, say: Callable[[str], None]) -> None:
        self.what, self.count, self.say, self.done = what, count, say, 0
        self.started = self.told = time.monotonic()

    def advance(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.count is None or now - self.told < _SECONDS_BETWEEN or self.done >= self.count:
            return
        self.told = now
        left = (now - self.started) / self.done * (self.count - self.done)
        self.say(f"{self.what}: {self.done:,} of {self.count:,} batches, about {_duration(left)} left")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class MeasuringLines(TrainerCallback):
    """[`Progress`] of an evaluation. what: in words."""

    def __init__(self, say: Callable[[str], None], what: str = "held-out loss") -> None:
        self.say, self.what = say, what
        self._progress: Progress | None = None

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_local_process_zero:
            return
        if self._progress is None:
            self._progress = Progress(self.what, _length(eval_dataloader), self.say)
        self._progress.advance()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._progress = None

    on_predict = on_evaluate


def _length(batches: Any) -> int | None:
    """How many batches there are; None where nobody knows."""
    try:
        return len(batches)
    except TypeError:
        return None


class LogLines(MeasuringLines, PrinterCallback):
    """Prints [`log_line`] where Trainer prints a dict, and how far an evaluation is."""

    def __init__(self) -> None:
        super().__init__(functools.partial(print, flush=True))

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
    """Puts lines for people in place of the dicts that a Trainer prints, and one about the memory before them. called:
    held-out figures by the names that say more."""
    for theirs, ours in ((PrinterCallback, LogLines), (ProgressCallback, LogLinesUnderBar)):
        if trainer.pop_callback(theirs) is not None:
            line = ours()
            line.called = called or {}
            trainer.add_callback(line)
    trainer.add_callback(MemoryLine(trainer))
