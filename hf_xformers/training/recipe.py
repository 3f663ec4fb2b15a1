# SPDX-License-Identifier: Apache-2.0
"""The training recipe of the original Transformer (Vaswani et al. 2017, arXiv 1706.03762, section 5).

It stands next to Trainer's own options: Adam's are `--adam_beta1 0.9 --adam_beta2 0.98 --adam_epsilon 1e-9`, smoothing
is `--label_smoothing_factor 0.1`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.given_options import refuse_alone
from ..core.saved_files import STATE_FILE, weights_defect

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


@dataclass
class Recipe:
    """Options of the recipe that Trainer lacks."""

    _argument_group_name = "recipe"

    label_smoothing_support: Literal["all", "others"] = field(
        default="all",
        metadata={"help": "What shares --label_smoothing_factor: all classes (torch) or the others alone (fairseq)."},
    )
    vaswani_lr_scale: float | None = field(
        default=None,
        metadata={
            "help": (
                "The paper's schedule in place of Trainer's: rate X * D^-0.5 * min(s^-0.5, s * warmup^-1.5) at step"
                " s = 1, 2, ..., width D, warmup from --warmup_steps."
            )
        },
    )
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": (
                "Batches of rows of similar length, of at most so many tokens with padding (source and target each)."
            )
        },
    )
    average_checkpoints: int | None = field(
        default=None,
        metadata={"help": "Evaluate and save the mean weights of the last N checkpoints."},
    )

    def check(self, args: TrainingArguments) -> None:
        """Raises ValueError for options that do not go together."""
        from transformers.trainer_utils import SaveStrategy

        for name in ("vaswani_lr_scale", "max_tokens", "average_checkpoints"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} {value} must be above 0; leave it out to go without")
        if self.vaswani_lr_scale is not None and args.warmup_steps < 1:
            raise ValueError(
                f"--vaswani_lr_scale counts warm-up in steps, and --warmup_steps is {args.warmup_steps:g}; give a"
                " whole number of at least 1, such as 4000"
            )
        if not args.label_smoothing_factor:
            refuse_alone(self, ("label_smoothing_support",), "--label_smoothing_factor")
        # Of those that are kept one is the best, however old it is.
        best, kept = args.metric_for_best_model is not None, args.save_total_limit
        wanted = None if self.average_checkpoints is None else self.average_checkpoints + best
        if wanted is not None and (args.save_strategy == SaveStrategy.NO or (kept is not None and kept < wanted)):
            raise ValueError(
                f"--average_checkpoints {self.average_checkpoints} needs as many checkpoints at the end"
                f"{', besides the best one' if best else ''}; give --save_strategy steps or epoch, and"
                f" --save_total_limit {wanted} or more"
            )
        every = int(args.save_steps) if args.save_strategy == SaveStrategy.STEPS and args.save_steps >= 1 else None
        there = -(-args.max_steps // every) if every and args.max_steps > 0 else None  # the last step is saved, too
        if self.average_checkpoints is not None and there is not None and there < self.average_checkpoints:
            raise ValueError(
                f"--average_checkpoints {self.average_checkpoints} needs as many checkpoints, and --save_steps {every}"
                f" saves {there} in --max_steps {args.max_steps}; lower --save_steps"
            )

    def chosen(self) -> dict[str, Any]:
        """What differs from the defaults, for the record of a run."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(Recipe)
            if getattr(self, entry.name) != entry.default
        }


def vaswani_rate(step: int, width: int, warmup: int, scale: float = 1.0) -> float:
    """The learning rate of optimizer step `step`, counted from 1: scale * width^-0.5 * min(step^-0.5, step *
    warmup^-1.5) (Vaswani et al. 2017, equation 3)."""
    return scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5)


def vaswani_schedule(
    optimizer: torch.optim.Optimizer, width: int, warmup: int, scale: float = 1.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """[`vaswani_rate`] for every group of an optimizer, relative to the groups' own rates: a group with half the rate
    of the first one keeps half of it."""
    base = optimizer.param_groups[0]["lr"]
    if not base > 0:
        raise ValueError(f"learning_rate {base} cannot be scaled; give one above 0")
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: vaswani_rate(done + 1, width, warmup, scale) / base
    )


def smoothing_among_all(epsilon: float, classes: int, support: str) -> float:
    """The share of all classes' mean that smooths as `epsilon` does among its `support`: taking it from the right
    class alone, and giving epsilon / (V - 1) to each other one, is eps' = epsilon V / (V - 1) among all."""
    return epsilon if support == "all" or classes < 2 else epsilon * classes / (classes - 1)


def row_lengths(dataset: Any) -> list[int]:
    """Tokens of each row, of its inputs or its labels, whichever are more."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise ValueError("--max_tokens needs the lengths of all rows; leave --streaming out")
    names = [name for name in ("input_ids", "labels") if name in dataset.column_names]
    columns = [[_tokens(row) for row in dataset[name]] for name in names]
    return [max(sizes) for sizes in zip(*columns)]


def _tokens(row: Any) -> int:
    """Of several texts in a row, such as choices, all are as long as the longest."""
    if not hasattr(row, "__len__"):
        return 0
    return len(row) * max(map(len, row)) if len(row) and hasattr(row[0], "__len__") else len(row)


def average_last_checkpoints(model: PreTrainedModel, folder: Path, count: int, world_size: int = 1) -> list[str]:
    """Gives a model the mean of the weights of the last `count` complete checkpoints in a run's folder; their names.

    world_size: the processes of the run, all of which have to call it.

    Raises ValueError where there are fewer, or they are in several files.
    """
    from safetensors.torch import load_file

    from .checkpoints import checkpoints
    from .expert_parts import load_whole

    if world_size > 1:
        torch.distributed.barrier()  # the last one may still be written
    saved = [path for path in reversed(checkpoints(folder)) if (path / STATE_FILE).is_file()]  # which is written last
    complete = [path for path in saved if weights_defect(path) is None]
    if len(complete) < count:
        raise ValueError(
            f"--average_checkpoints {count} found {len(complete)} in {str(folder)!r}; save more often (--save_steps)"
        )
    sums: dict[str, Tensor] = {}
    for path in complete[-count:]:
        file = path / "model.safetensors"
        if not file.is_file():
            raise ValueError(f"{str(path)!r} has no model.safetensors to average; save weights in one file")
        for name, value in load_file(file).items():
            wide = value.double() if value.is_floating_point() else value
            sums[name] = sums[name] + wide if name in sums and value.is_floating_point() else wide
    own = model.state_dict()
    load_whole(
        model,
        {
            name: (total / count if total.is_floating_point() else total).to(own[name].dtype)
            for name, total in sums.items()
            if name in own
        },
    )
    return [path.name for path in complete[-count:]]
