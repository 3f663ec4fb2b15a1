# SPDX-License-Identifier: Apache-2.0
"""One encoder with a head for each of several tasks (Liu et al. 2019, arXiv 1901.11504, MT-DNN): model, rows and
the order in which they are read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.given_options import changed, refuse_alone
from .uncertainty import CANDIDATES, UNCERTAINTY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLINGS = ("proportional", "sqrt", "uniform", "temperature", UNCERTAINTY)
TASK = "task"  # of a row and of a batch: whose it is
TASKS = "tasks"  # the input of models that are told the task, its number
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


@dataclass
class MultiTaskOptions:
    """Several tasks at once, over one encoder: --task NAME=TASK and --data NAME=FILES for each of them. So does any
    other option of task or data name the task it is of, as in --label_column NAME=COLUMN; else it is of all."""

    _argument_group_name = "several tasks"

    sampling: str = field(
        default="proportional",
        metadata={
            "help": (
                "How often a batch is of a task with n rows: proportional to n, to its square root (sqrt), equally"
                " often (uniform), or to n^(1/T) (temperature). uncertainty: each step reads a batch of every task,"
                " and trains on a batch of those rows of which the model knows the answers least."
            )
        },
    )
    sampling_temperature: float = field(
        default=5.0, metadata={"help": "T of --sampling temperature: 1 is proportional, a high one near uniform."}
    )

    def check(self) -> None:
        """Raises ValueError for an unknown sampling and a temperature out of range."""
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"--sampling {self.sampling!r} is unknown; take one of {', '.join(SAMPLINGS)}")
        if not 0 < self.sampling_temperature < math.inf:
            raise ValueError(f"--sampling_temperature {self.sampling_temperature:g} must be above 0, as 1 is")
        if self.sampling != "temperature":
            refuse_alone(self, ("sampling_temperature",), "--sampling temperature")

    def chosen(self) -> bool:
        """Whether anything differs from the defaults."""
        return bool(changed(self))

    @property
    def exponent(self) -> float:
        """Of the number of rows of a task, for how often it comes."""
        return {"proportional": 1.0, "sqrt": 0.5, "uniform": 0.0}.get(self.sampling, 1 / self.sampling_temperature)


# ------------------------------------------------------------------------------------------------ rows


class NamedRows:
    """The features of one task, each with its name."""

    def __init__(self, rows: Any, name: str) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], TASK: self.name}


class JoinedRows:
    """The rows of all tasks, task after task."""

    def __init__(self, parts: Sequence[NamedRows]) -> None:
        self.parts = list(parts)
        self.starts = [sum(map(len, self.parts[:index])) for index in range(len(self.parts))]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = max(place for place, start in enumerate(self.starts) if start <= index)
        return self.parts[part][index - self.starts[part]]


class TaskCollator:
    """Batches of one task, by that task's own collator; of rows of several tasks a batch of each, as candidates."""

    def __init__(self, collators: Mapping[str, Any]) -> None:
        self.collators = dict(collators)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        parts: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            parts.setdefault(row[TASK], []).append({key: value for key, value in row.items() if key != TASK})
        made = {name: self.collators[name](part) for name, part in parts.items()}
        if len(made) > 1:
            return {CANDIDATES: made}
        ((name, batch),) = made.items()
        return {**batch, TASK: name}


class WithTaskNumber:
    """A collator for models that are told the task (input `tasks` [B], CA-MTL): batches of one task, by
    `plain`, with its number."""

    def __init__(self, plain: Any, number: int) -> None:
        self.plain, self.number = plain, number

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self.plain(rows), TASKS: torch.full((len(rows),), self.number)}


def number_of_tasks(config: Any) -> int | None:
    """How many tasks a model of a configuration tells apart; None where it is not told the task."""
    from ..configuration_xformer import XFormerConfig
    from ..core.tasks import number_of_tasks as told

    return told(config) if isinstance(config, XFormerConfig) else None


def batch_counts(sizes: Sequence[int], batch_size: int, exponent: float) -> list[int]:
    """Batches of each task in an epoch, as many together as all rows make: in proportion to n^exponent, at least one
    each, rounded so that the sum stays (the largest remainders up). An exponent of 1 gives every row its turn once."""
    whole = [math.ceil(size / batch_size) for size in sizes]
    if exponent == 1:
        return whole
    shares = [size**exponent for size in sizes]
    wanted = [sum(whole) * share / sum(shares) for share in shares]
    counts = [max(1, math.floor(value)) for value in wanted]
    order = sorted(range(len(sizes)), key=lambda index: (math.floor(wanted[index]) - wanted[index], index))
    for index in order[: max(0, sum(whole) - sum(counts))]:
        counts[index] += 1
    return counts


class TaskBatchSampler:
    """Batches of one task each, those of all tasks shuffled (algorithm 1 of MT-DNN); other ones in every epoch.

    A task that comes more often than it has rows for begins again, in another order. batch_size: rows of a process, of
    which there are `processes`: theirs follow each other, the parts of one batch (the first of its rows make up for
    what the last part lacks). Call `set_epoch` before each epoch; Trainer does.
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, exponent: float = 1.0, seed: int = 0, processes: int = 1
    ) -> None:
        self.sizes, self.seed, self.epoch, self.processes = list(sizes), seed, 0, processes
        self.step_rows = batch_size * processes  # Accelerate would drop shorter batches than a `batch_size` of it
        self.counts = batch_counts(self.sizes, self.step_rows, exponent)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def sampler(self) -> TaskBatchSampler:
        """Itself: where Accelerate looks for `set_epoch` once it has wrapped the batch sampler."""
        return self

    def __len__(self) -> int:
        return sum(self.counts) * self.processes

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(self.seed + 1000003 * self.epoch)
        batches: list[list[int]] = []
        start = 0
        for size, count in zip(self.sizes, self.counts):
            own: list[list[int]] = []
            while len(own) < count:
                order = [start + index for index in torch.randperm(size, generator=draw).tolist()]
                own += [order[place : place + self.step_rows] for place in range(0, size, self.step_rows)]
            batches += own[:count]
            start += size
        for index in torch.randperm(len(batches), generator=draw).tolist():
            yield from self._parts(batches[index])

    def _parts(self, batch: list[int]) -> Iterator[list[int]]:
        """A batch of one step, divided over the processes."""
        size = -(-len(batch) // self.processes)
        whole = [batch[index % len(batch)] for index in range(size * self.processes)]
        for process in range(self.processes):
            yield whole[process * size : (process + 1) * size]


# ------------------------------------------------------------------------------------------------ the model


class MultiTaskModel(nn.Module):
    """Models for several tasks whose base is one and the same module.

    models: by task, each with its own base of one configuration, or a `peft.PeftModel` around such a model. The base
    of the first that has a pooler (or of the first at all) becomes that of all, with the adapter in it; the others are
    dropped. bottleneck: whether the models have adapters of this package.
    """

    def __init__(self, models: Mapping[str, PreTrainedModel], *, bottleneck: bool = False) -> None:
        super().__init__()
        plain = {name: plain_model(model) for name, model in models.items()}
        self.with_pooler = {name: getattr(one.base_model, "pooler", None) is not None for name, one in plain.items()}
        chosen: Any = plain[next((name for name in plain if self.with_pooler[name]), next(iter(plain)))]
        self.prefix, self.bottleneck = str(chosen.base_model_prefix), bottleneck
        self.encoder = getattr(chosen, self.prefix)
        self.heads = nn.ModuleDict(models)
        for one in plain.values():
            one._modules.pop(self.prefix)
            object.__setattr__(one, self.prefix, self.encoder)  # read as before, and not one of its parts
        self.config: Any = chosen.config

    def forward(self, task: str, **inputs: Any) -> Any:
        return self.heads[task](**inputs)

    def can_generate(self) -> bool:
        return False

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        heads = [p for p in self.heads.parameters() if p.requires_grad or not only_trainable]
        return self.encoder.num_parameters(only_trainable, exclude_embeddings) + sum(p.numel() for p in heads)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.encoder.gradient_checkpointing_enable(**options)

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[Any]:
        """One task's model as it was given, with the encoder among its parts."""
        head: Any = self.heads[name]
        plain, parts = plain_model(head), self.encoder._modules
        pooler = parts.get("pooler")
        plain._modules[self.prefix] = self.encoder
        if not self.with_pooler[name] and pooler is not None:
            parts["pooler"] = None
        try:
            yield head
        finally:
            del plain._modules[self.prefix]
            if pooler is not None:
                parts["pooler"] = pooler

    def save_task(self, name: str, folder: str | Path) -> None:
        """Writes one task's model as a whole, as a model of its class by itself; of adapters that and the head."""
        with self.whole(name) as head:
            if self.bottleneck:
                from ..adapters import save_adapter

                save_adapter(head, folder)
            else:
                head.save_pretrained(folder)


def plain_model(model: Any) -> Any:
    """The model itself, without the one of `peft` around it."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def load_tasks(folder: str | Path) -> MultiTaskModel:
    """The model of a run of several tasks, with one encoder again.

    Raises ValueError for a folder that is none.
    """
    from ..training.run_folder import read_summary
    from . import loading

    summary = read_summary(folder)
    names = summary.get("tasks")
    if not names:
        raise ValueError(f"{str(folder)!r} holds no model of several tasks; give the folder of such a run")
    if summary.get("peft") is not None:
        raise ValueError(
            f"{str(folder)!r} holds adapters ({summary['peft']}), one for each of the tasks {', '.join(names)}; load"
            " each onto its base by itself"
        )
    models = {}
    for name, about in names.items():
        place = str(Path(folder) / name)
        config = loading.open_config(place)
        models[name], _ = loading.load_model(place, config, about["head"], has_head=True, new_head=False)
    return MultiTaskModel(models)
