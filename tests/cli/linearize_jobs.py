"""What the two processes of test_linearize.py do, see [`tests.training.processes.run_jobs`]: a run of the command that
is stopped, and the same again. Its arguments lie in the folder beside those of the jobs."""

from __future__ import annotations

import json
from pathlib import Path

from hf_xformers.cli.linearize import run
from tests.cli.test_linearize import Stop


def _arguments(folder: str) -> list[str]:
    return json.loads((Path(folder).parent / "arguments.json").read_text())


def stopped(rank: int, world: int, folder: str) -> bool:
    try:
        run(_arguments(folder), [Stop("distillation", 2)])
    except InterruptedError:
        return True
    return False


def resumed(rank: int, world: int, folder: str) -> int:
    return run(_arguments(folder))
