# SPDX-License-Identifier: Apache-2.0
"""What goes is chosen by training: gates on heads that close, masks of weights that move.

The run stands in a folder of its own, with its checkpoints, and continues with `--resume_from_checkpoint`. What it
leaves there is the model without gates and masks: closed ones are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..core.saved_files import read_object, write_json
from ..training.merged_adapters import PutIn
from ..training.run_folder import read_summary
from .choice import OWN
from .gates import GatedHeads
from .head_pruning import Kept, head_layers
from .rows import task_data, text_data
from .weights import cubic, prunable_weights, put_masks, take_masks

if TYPE_CHECKING:
    from torch import nn
    from transformers import Seq2SeqTrainingArguments

    from .choice import Pruning

KEPT, SETTINGS = "kept_heads.json", "pruning.json"
Told = Callable[[str], None]


class GatesInTraining:
    """Gates on all heads, with what they have left in the end."""

    def __init__(self, choice: Pruning, args: Seq2SeqTrainingArguments, folder: Path):
        self.choice, self.args, self.folder = choice, args, folder

    def put(self, model: Any) -> None:
        write_json(self.folder / SETTINGS, _settings(self.choice))
        self.gated = GatedHeads(
            model,
            head_layers(model),
            self.choice.gate_penalty,
            speed=self.choice.gate_learning_rate / self.args.learning_rate,
        )

    def merge(self, model: Any) -> None:
        kept = self.gated.open_heads()
        self.gated.fold()
        write_json(self.folder / KEPT, {"kept": [[*key, heads] for key, heads in kept.items()]})


class MasksInTraining(TrainerCallback):
    """Masks of weights, whose share of zeros grows with the steps."""

    def __init__(self, choice: Pruning, args: Seq2SeqTrainingArguments, folder: Path):
        self.choice, self.args, self.folder = choice, args, folder
        self.masks: list[nn.Module] = []

    def put(self, model: Any) -> None:
        write_json(self.folder / SETTINGS, _settings(self.choice))
        self.weights = prunable_weights(model, self.choice.exclude)
        self.masks = put_masks(self.weights, self.choice.chosen_by, self.choice.pattern)

    def merge(self, model: Any) -> None:
        self._set(self.choice.sparsity)  # a run that was short has not come so far
        take_masks(self.weights)

    def _set(self, sparsity: float) -> None:
        for mask in self.masks:
            mask.sparsity = sparsity  # type: ignore[assignment]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._set(cubic(state.global_step, state.max_steps, self.choice.sparsity))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._set(cubic(state.global_step + 1, state.max_steps, self.choice.sparsity))


def train(
    choice: Pruning,
    args: Seq2SeqTrainingArguments,
    folder: Path,
    callbacks: Sequence[TrainerCallback],
    say: Told,
) -> None:
    """Trains on the model's own task or objective, from its weights, unless that is finished in `folder`.

    Raises:
        ValueError: settings other than those that the training was begun with.
    """
    from ..finetuning.trained import does_a_task
    from ..training.run import Run

    run = Run(args)
    if (folder / SETTINGS).is_file():
        run.check_settings(read_object(folder / SETTINGS), _settings(choice))
    if read_summary(folder).get("status") == "finished":
        return
    insertion: Any = (GatesInTraining if choice.method == "heads" else MasksInTraining)(choice, args, folder)
    if isinstance(insertion, TrainerCallback):
        callbacks = [*callbacks, insertion]
    own = run.stage(folder.name, load_best_model_at_end=False)  # it is an early one, with all its parts
    if own.save_strategy == SaveStrategy.BEST:
        own.save_strategy = SaveStrategy.EPOCH
    found = own.resume_from_checkpoint
    say(f"training in {folder}" + ("" if found is None else f", resuming from {found}"))
    (_train_task if does_a_task(choice.model) else _train_text)(choice, own, insertion, callbacks)


def kept_heads(folder: Path) -> Kept:
    """The heads whose gates a training has left open."""
    return {(tower, index): heads for tower, index, heads in read_object(folder / KEPT)["kept"]}


def _settings(choice: Pruning) -> dict[str, Any]:
    """What a training that continues has to share with its start."""
    own = {name: getattr(choice, name) for name in OWN[choice.method]}
    return {"model": choice.model, "method": choice.method, "by": choice.chosen_by, "data": choice.data, **own}


def _train_task(
    choice: Pruning, args: Seq2SeqTrainingArguments, insertion: PutIn, callbacks: Sequence[TrainerCallback]
) -> None:
    from ..finetuning.options import ModelOptions, RunOptions
    from ..finetuning.run import FineTuning
    from ..finetuning.trained import open_trained

    trained = open_trained(choice.model)
    made = FineTuning(
        ModelOptions(model=choice.model),
        task_data(choice.model, choice.data, trained.record),
        trained.task.options,
        RunOptions(overwrite_output_dir=True),
        args,
    )
    made.guest = insertion
    made.train(made.prepare(), callbacks)


def _train_text(
    choice: Pruning, args: Seq2SeqTrainingArguments, insertion: PutIn, callbacks: Sequence[TrainerCallback]
) -> None:
    from ..training.preparation import ModelChoice, Preparation
    from ..training.pretraining import train
    from ..training.scoring import choose_objective, load_config, training_of

    trained = training_of(choice.model)
    objective = choose_objective(load_config(choice.model), None, {}, trained)
    fields = {name: value for name, value in objective.to_dict().items() if name != "type"}
    model = ModelChoice(
        init_from=choice.model,
        objective=objective.type,
        block_size=trained.get("block_size"),
        overwrite_output_dir=True,
    )
    preparation = Preparation(model, text_data(choice.model, choice.data), args, objective_fields=fields)
    train(preparation.run(), args, callbacks, adapters=insertion)
