"""How a run is divided over its processes, beside the rows that each reads."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..core.parallel_plans import check_expert_parallel
from ..core.sequence_parallel import check_sequence_parallel


@dataclass
class ExpertOptions:
    """Experts in different processes."""

    expert_parallel: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "true",
            "metavar": "N",
            "help": (
                "Split the experts of a mixture over so many processes of a launch (without a number: all), and shard"
                " the rest of the model."
            ),
        },
    )

    def check_devices(self, config: Any, world_size: int) -> None:
        """Raises ValueError for options that a model, or that many processes, cannot serve."""
        for name, given in self.devices().items():
            processes = processes_of(name, given, world_size)
            if processes > 1 and name == "sequence_parallel":
                check_sequence_parallel(config)
            elif processes > 1:
                check_expert_parallel(config, processes, name)

    def devices(self) -> dict[str, bool | int]:
        """The options of [`XFormerTrainer`] that were chosen. Raises ValueError for what is no number."""
        names = (entry.name for entry in dataclasses.fields(self) if entry.name in _DIVIDES)
        chosen = {name: _processes(name, getattr(self, name)) for name in names}
        return {name: given for name, given in chosen.items() if given}


@dataclass
class DeviceOptions(ExpertOptions):
    """What pretraining can divide."""

    _argument_group_name = "devices"

    sequence_parallel: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "true",
            "metavar": "N",
            "help": "Divide every text over so many processes of a launch (without a number: all).",
        },
    )

    def refuse(self, name: str, why: str) -> None:
        """Raises ValueError where this option was chosen."""
        if self.devices().get(name):
            raise ValueError(f"--{name} {why}; leave it out")


_DIVIDES = {"expert_parallel": "splits experts", "sequence_parallel": "divides texts"}


def processes_of(option: str, given: bool | int, world_size: int) -> int:
    """How many processes an option of [`XFormerTrainer`] names. Raises ValueError where the run's are not a multiple
    of it."""
    processes = world_size if given is True else int(given)
    if processes and (processes < 1 or world_size % processes):
        raise ValueError(
            f"`{option}={given}` {_DIVIDES[option]} over so many processes, and {world_size} are not a multiple of it;"
            " take a number that divides them, or start a multiple of it."
        )
    return processes


def ties_beyond_ends(model: Any) -> bool:
    """Whether a parameter of the token table, or of the output matrix, stands in other modules too: in the table of a
    second tower, in a generator or in a further head."""
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    ends = [module for module in (table, output) if module is not None]
    tied = getattr(table, "weight", None) is not None and table.weight is getattr(output, "weight", None)
    own = [{id(parameter) for parameter in module.parameters()} for module in ends]
    inside = {id(module) for end in ends for module in end.modules()}
    rest = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    units = [set().union(*own)] if tied else own
    return any(one & other for one, other in itertools.combinations([*units, rest], 2))


@contextlib.contextmanager
def ends_in_one_unit(model: Any) -> Iterator[None]:
    """Inside, `accelerator.prepare(model)` shards the token table and all that is tied to it together with what stands
    outside of layers. Accelerate's FSDP2 makes a unit of the table and one output matrix, and torch refuses a
    parameter that is in two units. A model without further ties is left to Accelerate."""
    if not ties_beyond_ends(model):
        yield
        return
    model.get_input_embeddings = model.get_output_embeddings = lambda: None  # by which Accelerate finds them
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings


def _processes(name: str, given: str | None) -> bool | int:
    word = (given or "false").lower()
    if word in ("true", "yes", "on", "false", "no", "off"):
        return word in ("true", "yes", "on")
    if word.isdecimal():
        return int(word)
    raise ValueError(f"--{name} {given} is no number of processes; give one, or none for all")


__all__ = ["DeviceOptions", "ExpertOptions", "ends_in_one_unit", "processes_of"]
