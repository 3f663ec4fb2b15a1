"""The Trainer callback that tells a collator which epoch it is."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from .base import Collator


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
