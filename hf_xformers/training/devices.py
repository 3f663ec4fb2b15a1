# SPDX-License-Identifier: Apache-2.0
"""How a run is divided over its processes, besides the rows that each reads."""

from __future__ import annotations

import dataclasses
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


def _processes(name: str, given: str | None) -> bool | int:
    word = (given or "false").lower()
    if word in ("true", "yes", "on", "false", "no", "off"):
        return word in ("true", "yes", "on")
    if word.isdecimal():
        return int(word)
    raise ValueError(f"--{name} {given} is no number of processes; give one, or none for all")
