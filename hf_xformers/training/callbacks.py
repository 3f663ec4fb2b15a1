"""Trainer callbacks of pretraining."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import TrainingArguments

from ..objectives import Collator

__all__ = ["EpochCallback", "ExactSaves"]


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

    def __init__(self, collator: Collator) -> None:
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
