# SPDX-License-Identifier: Apache-2.0
"""Self-ensemble and self-distillation (Xu et al. 2020, arXiv 2002.10345): the last steps of a fine-tuning as a mean
to use, or as a teacher to learn from.

    se    use the mean of the weights of the last K steps
    sda   loss + lambda MSE(z(x; w_t), z(x; mean of w_{t-1}, ..., w_{t-K}))
    sdv   loss + lambda MSE(z(x; w_t), mean of z(x; w_{t-1}), ..., z(x; w_{t-K}))

The mean is the exact one over a sliding window, so that K copies of what is trained are kept.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..core.given_options import refuse_alone
from ..core.losses import per_target
from ..training.randomness import preserved_randomness

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

MODES = {
    "se": "the mean of the weights",
    "sda": "a teacher of averaged weights",
    "sdv": "teachers that vote",
}
HEADS = ("SequenceClassification", "TokenClassification", "MultipleChoice", "ImageClassification")
WINDOW_FILE = "self_ensemble.safetensors"
IGNORE_INDEX = -100


@dataclass
class SelfEnsembleOptions:
    """How the weights of past steps are used."""

    self_ensemble: str | None = field(
        default=None,
        metadata={
            "help": (
                "Use the model's own last steps: se evaluates and saves the mean of their weights, sda learns from the"
                " logits of that mean, sdv from the mean of their logits."
            )
        },
    )
    teacher_window: int = field(default=5, metadata={"help": "How many steps --self_ensemble looks back (K)."})
    teacher_update: str = field(
        default="step", metadata={"help": "What --self_ensemble takes for a step: step, or the end of an epoch."}
    )
    self_distillation_weight: float = field(
        default=1.0, metadata={"help": "Weight of the squared error to the teacher's logits, of sda and sdv."}
    )

    def check_self_ensemble(self, head: str, task: str, averages: bool) -> None:
        """Raises ValueError for values out of range and for tasks without class scores."""
        if self.self_ensemble is None:
            alone = ("teacher_window", "teacher_update", "self_distillation_weight")
            refuse_alone(self, alone, "--self_ensemble")
            return
        if self.self_ensemble not in MODES:
            raise ValueError(f"--self_ensemble {self.self_ensemble!r} is unknown; take one of {', '.join(MODES)}")
        if self.teacher_window < 1:
            raise ValueError(f"--teacher_window {self.teacher_window} must be at least 1")
        if self.teacher_update not in ("step", "epoch"):
            raise ValueError(f"--teacher_update {self.teacher_update!r} is unknown; take step or epoch")
        if not 0 <= self.self_distillation_weight < float("inf"):
            raise ValueError(
                f"--self_distillation_weight {self.self_distillation_weight:g} must be at least 0; the paper's is 1"
            )
        if self.self_ensemble != "se" and head not in HEADS:
            raise ValueError(
                f"--self_ensemble {self.self_ensemble} compares the scores of classes or numbers of a row, and {task}"
                " has none; take --self_ensemble se"
            )
        if self.self_ensemble == "se" and averages:
            raise ValueError("--self_ensemble se and --average_checkpoints both average weights; drop one")

    @property
    def distils(self) -> bool:
        return self.self_ensemble in ("sda", "sdv")

    def self_ensemble_record(self) -> dict[str, Any]:
        """What was chosen, for the record of a run."""
        if self.self_ensemble is None:
            return {}
        found = {"mode": self.self_ensemble, "window": self.teacher_window, "update": self.teacher_update}
        return {"self_ensemble": {**found, **({"weight": self.self_distillation_weight} if self.distils else {})}}


class SelfEnsemble:
    """The weights of the last K steps of a model, of those parameters that are trained, newest last."""

    def __init__(self, model: PreTrainedModel, options: SelfEnsembleOptions) -> None:
        self.model, self.options = model, options
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.window: deque[dict[str, Tensor]] = deque(maxlen=options.teacher_window)
        self._teacher: Any = copy.deepcopy(model).eval().requires_grad_(False) if options.distils else None
        self._holds: str | None = None  # what the teacher's weights are now

    @property
    def teaches(self) -> bool:
        return self.options.distils and self.options.self_distillation_weight > 0

    def push(self) -> None:
        """Takes the model's weights of now into the window."""
        parameters = dict(self.model.named_parameters())
        self.window.append({name: parameters[name].detach().clone() for name in self.names})
        self._holds = None

    def mean(self) -> dict[str, Tensor]:
        """The mean over the window, summed in double precision."""
        found = {}
        for name in self.names:
            total = sum(weights[name].double() for weights in self.window)
            found[name] = (total / len(self.window)).to(self.window[0][name].dtype)  # type: ignore[union-attr]
        return found

    # ------------------------------------------------------------------------------------------------ as a teacher

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """What the window says of a batch: of the mean of its weights (sda), or the mean of what each says (sdv).

        The teacher has no dropout and leaves the random generators where they are.
        """
        given = {name: value for name, value in inputs.items() if name not in ("labels", "num_items_in_batch")}
        if self.options.self_ensemble == "sda":
            self._teach("mean", None)
            return self._read(given)
        total: Any = 0
        for index, weights in enumerate(self.window):
            self._teach(f"{index}", weights)
            total = total + self._read(given).double()
        return (total / len(self.window)).float()

    def _teach(self, what: str, weights: Mapping[str, Tensor] | None) -> None:
        if self._holds == what:
            return
        weights = self.mean() if weights is None else weights
        with torch.no_grad():
            own = dict(self._teacher.named_parameters())
            for name, value in weights.items():
                own[name].copy_(value)
            for mine, theirs in zip(self._teacher.buffers(), self.model.buffers()):
                if mine.shape == theirs.shape:
                    mine.copy_(theirs)
        self._holds = what

    def _read(self, inputs: Mapping[str, Any]) -> Tensor:
        self._teacher.to(next(self.model.parameters()).device)
        with torch.no_grad(), preserved_randomness():
            return self._teacher(**inputs)["logits"].float()

    def error(self, logits: Tensor, labels: Tensor | None, inputs: Mapping[str, Any], count: Any = None) -> Tensor:
        """Squared error to the teacher's logits, the mean over classes and rows (over labeled tokens where labels are
        of tokens). count: rows or tokens of the whole step, to divide by in place of those of the batch."""
        taught = self.logits(inputs)
        squared = (logits.float() - taught).square().mean(-1)
        if labels is not None and labels.shape == squared.shape:
            known = labels != IGNORE_INDEX
            return per_target((squared * known).sum(), known.sum() if count is None else count)
        return squared.mean() if count is None else per_target(squared.sum(), count)

    # ------------------------------------------------------------------------------------------------ as a mean

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the mean weights inside, in mode se once there are steps to average."""
        if self.options.self_ensemble != "se" or not self.window:
            yield
            return
        parameters = dict(self.model.named_parameters())
        before = {name: parameters[name].detach().clone() for name in self.names}
        _copy(parameters, self.mean())
        try:
            yield
        finally:
            _copy(parameters, before)

    def settle(self, checkpoint: str | Path | None) -> None:
        """At the end, in mode se: gives the model the mean for good. checkpoint: the one whose window counts, if it is
        not the last."""
        if self.options.self_ensemble != "se":
            return
        if checkpoint is not None:
            self.load(checkpoint)
        if self.window:
            _copy(dict(self.model.named_parameters()), self.mean())
        self.window.clear()

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, folder: str | Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{index}.{name}": value.cpu().contiguous()
            for index, weights in enumerate(self.window)
            for name, value in weights.items()
        }
        save_file(tensors, Path(folder) / WINDOW_FILE, metadata={"format": "pt"})

    def load(self, folder: str | Path) -> None:
        """Raises ValueError for a checkpoint without the weights of past steps, or of another window."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(Path(folder) / WINDOW_FILE)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"the checkpoint {str(folder)!r} has no {WINDOW_FILE} that can be read, with the weights of past"
                " steps; resume from another one, or with the options of the first start"
            ) from error
        parameters = dict(self.model.named_parameters())
        self.window.clear()
        for index in range(len(tensors) // max(1, len(self.names))):
            self.window.append({name: tensors[f"{index}.{name}"].to(parameters[name].device) for name in self.names})
        self._holds = None


def _copy(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


class EnsembleCallback(TrainerCallback):
    """Keeps the window. A teacher is of the steps before the current one: its window takes a step's weights when the
    next one has made its gradient, so that the first teacher is the model itself."""

    def __init__(self, ensemble: SelfEnsemble) -> None:
        self.ensemble, self.by_step = ensemble, ensemble.options.teacher_update == "step"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.ensemble.options.distils and not self.ensemble.window:
            self.ensemble.push()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.by_step and self.ensemble.options.distils and state.global_step > 0:
            self.ensemble.push()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.by_step and not self.ensemble.options.distils:
            self.ensemble.push()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.by_step:
            self.ensemble.push()
