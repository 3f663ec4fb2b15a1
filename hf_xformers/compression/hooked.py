"""Fine-tuning with something put into the model while it trains, and taken out of it before it is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..finetuning.run import FineTuning, Prepared


class Guest(Protocol):
    """What is in a model while it trains."""

    def put(self, model: Any) -> None: ...

    def merge(self, model: Any) -> None: ...


class HookedFineTuning(FineTuning):
    """[`FineTuning`] with a guest in its model, another trainer, or other training rows.

    guest: put in before training, taken out before the model is saved. trainer: makes the trainer. rows: makes other
    features of the training rows, with the collator of the run.
    """

    guest: Guest | None = None
    trainer: Callable[..., Any] | None = None
    rows: Callable[[Prepared], Any] | None = None

    def _model(self, prepared: Prepared) -> Any:
        model = super()._model(prepared)
        if self.rows is not None:
            prepared.splits["train"].features = self.rows(prepared)
        if self.guest is not None:
            self.guest.put(model)
        return model

    def make_trainer(self, **options: Any) -> Any:
        return super().make_trainer(**options) if self.trainer is None else self.trainer(**options)

    def _save(self, trainer: Any, model: Any) -> None:
        if self.guest is not None:
            self.guest.merge(model)
        super()._save(trainer, model)


__all__ = ["Guest", "HookedFineTuning"]
