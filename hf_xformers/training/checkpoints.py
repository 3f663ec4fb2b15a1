# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a run a resume may start from. A save that was interrupted leaves one that it may not."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.saved_files import (
    CHECKPOINT,
    SHARDED_OPTIMIZER,
    STATE_FILE,
    SUMMARY_FILE,
    safetensors_defect,
    weight_files,
    weights_defect,
)

# What FSDP and DeepSpeed write in place of the plain files; they check their own shards when they load them.
_SHARDED = ("pytorch_model_fsdp*", "global_step*")
# Values of --resume_from_checkpoint that name no folder: continue from the newest one, or start anew.
NEWEST, NO_CHECKPOINT = ("true", "yes", "1"), ("none", "false", "no", "0", "")


def checkpoints(run: str | Path) -> list[Path]:
    """The folders `checkpoint-<step>` of a run, newest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.is_dir() and CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def defect(checkpoint: str | Path, world_size: int = 1) -> str | None:
    """Why training cannot be resumed from `checkpoint`, in a few words; None when it can. Trainer writes its state
    last, so that marks a save that came to its end.

    world_size: number of processes that will resume; each has its own random state.
    """
    folder = Path(checkpoint)
    try:
        state = json.loads((folder / STATE_FILE).read_text())
    except FileNotFoundError:
        return f"it has no {STATE_FILE}"
    except (ValueError, OSError):
        return f"its {STATE_FILE} is cut off"
    if not isinstance(state, dict) or "global_step" not in state:
        return f"its {STATE_FILE} names no step"
    if any(any(folder.glob(pattern)) for pattern in _SHARDED):
        return None
    ranks = [""] if world_size <= 1 else [f"_{rank}" for rank in range(world_size)]
    sharded = (folder / SHARDED_OPTIMIZER / ".metadata").is_file()  # which is written last
    optimizer = [] if sharded else ["optimizer.pt"]
    archives = [*optimizer, "scheduler.pt", *(f"rng_state{rank}.pth" for rank in ranks)]
    for name in archives:
        if not (folder / name).is_file():
            return f"it has no {name}"
        if not zipfile.is_zipfile(folder / name):  # looks at the end of the file, which is written last
            return f"its {name} is cut off"
    return _weights_defect(folder)


def _weights_defect(folder: Path) -> str | None:
    problem, adapter = weights_defect(folder), folder / "adapter_model.safetensors"
    if problem is not None or weight_files(folder):
        return problem
    if not adapter.is_file():
        return "it has no model.safetensors"
    problem = safetensors_defect(adapter)
    return None if problem is None else f"its {adapter.name} {problem}"


def misfit(report: Mapping[str, Any], keep: Callable[[str], bool] = lambda key: True) -> str | None:
    """What does not fit between a checkpoint and the model that was loaded from it (`output_loading_info=True`), in a
    few words; None when all does. keep: which tensors matter."""
    for kind, text in (
        ("missing_keys", "has no weights for"),
        ("unexpected_keys", "has weights that the model has no place for:"),
        ("mismatched_keys", "has weights of another size for"),
    ):
        names = sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in report[kind])
        wrong = [name for name in names if keep(name)]
        if wrong:
            return f"{text} {wrong[0]!r} (and {len(wrong) - 1} more)"
    return None


def check_processes(checkpoint: str | Path, world_size: int) -> None:
    """Refuses to continue from a checkpoint with another number of processes: a step would have other rows.

    Raises:
        ValueError: a complete checkpoint has the random states of more or fewer processes than `world_size`.
    """
    folder = Path(checkpoint)
    saved = _processes(folder)
    if saved not in (None, world_size) and (folder / STATE_FILE).is_file():
        raise ValueError(
            f"{str(checkpoint)!r} was saved by a run with `num_processes` {saved}, and this one has {world_size};"
            f" start {saved}, or start a new run in another output folder"
        )


def _processes(checkpoint: Path) -> int | None:
    """Of how many processes a checkpoint has the random states."""
    apart = len(list(checkpoint.glob("rng_state_*.pth")))  # of several; one alone is what an interruption left
    return 1 if (checkpoint / "rng_state.pth").is_file() else apart if apart > 1 else None


def newest_complete(run: str | Path, world_size: int = 1) -> Path | None:
    """The newest checkpoint of a run that is complete; warns about every newer one that is not.

    Raises:
        ValueError: one that was saved by another number of processes.
    """
    found = checkpoints(run)
    # All checkpoints of a run are of as many processes; one with fewer states than another was interrupted.
    same = any(_processes(checkpoint) == world_size for checkpoint in found)
    for checkpoint in found:
        if not same:
            check_processes(checkpoint, world_size)
        problem = defect(checkpoint, world_size)
        if problem is None:
            return checkpoint
        warnings.warn(f"{checkpoint} is passed over: {problem}", stacklevel=2)
    return None


def where_it_stands(run: str | Path, world_size: int = 1) -> str:
    """How to continue with a run, or one in stages, that was stopped, in words; nothing for a folder of no run."""
    run = Path(run)
    if not (run / SUMMARY_FILE).is_file() and not checkpoints(run):
        return ""
    found = [path for place in (run, *filter(Path.is_dir, run.glob("*"))) for path in checkpoints(place)]
    whole = [path for path in found if defect(path, world_size) is None]
    if not whole:
        return "no checkpoint is whole yet, so the same command has to begin anew (--save_steps saves more often)"
    newest = max(whole, key=lambda path: (path / STATE_FILE).stat().st_mtime)
    return f"{str(newest)!r} is whole: the same command with --resume_from_checkpoint continues from there"


def checkpoint_to_resume(value: str | bool | None, run: str | Path, world_size: int = 1) -> Path | None:
    """The folder that `--resume_from_checkpoint` stands for.

    value: None or False (start anew), True (the newest complete checkpoint of the run), or a folder.

    Raises ValueError when there is none, when the folder named is not complete, or for another number of processes.
    """
    if isinstance(value, str) and value.lower() in (*NEWEST, *NO_CHECKPOINT):
        value = value.lower() in NEWEST
    if value is None or value is False:
        return None
    if value is True:
        found = newest_complete(run, world_size)
        if found is None:
            raise ValueError(
                f"{str(run)!r} holds no complete checkpoint to resume from; leave --resume_from_checkpoint out to"
                " start the run, or name a checkpoint folder"
            )
        return found
    folder = Path(value)
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {value!r} to resume from; give a folder checkpoint-<step>")
    check_processes(folder, world_size)
    problem = defect(folder, world_size)
    if problem is not None:
        raise ValueError(
            f"training cannot be resumed from {value!r}: {problem}; name an earlier checkpoint, or give "
            "--resume_from_checkpoint without a value for the newest complete one"
        )
    return folder
