"""Jobs that run in two processes with a gloo group, and in one without, for comparison: forked after the imports."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch

from tests.forks import forks, offline

# Starts `ranks` of each world size, waits for all, and ends the others when one fails or time is up.
_PARENT = """
import gc, importlib, json, os, signal, sys, time, traceback
module, jobs, folder, worlds, seconds, largest = json.loads(sys.argv[1])
import torch
jobs = [getattr(importlib.import_module(module), name) for name in jobs]
gc.freeze()  # what all processes share is not looked through in each

def work(rank, world):
    import torch.distributed as dist
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(ACCELERATE_USE_CPU="true")
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + world - 2)  # each world a port of its own
        dist.init_process_group("gloo")
    for job in jobs:
        if world > largest.get(job.__name__, world):
            continue
        result = job(rank, world, os.path.join(folder, job.__name__))
        torch.save(result, os.path.join(folder, f"{job.__name__}-{world}-{rank}.pt"))

children = {}
for world in worlds:
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                work(rank, world)
            except BaseException:
                print(f"process {rank} of {world}", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children[child] = f"process {rank} of {world}"
failed, end = 0, time.monotonic() + seconds
while children and not failed:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child:
        failed = failed or status
        print(children.pop(child), "ended with", status)
    elif time.monotonic() > end:
        failed = True
        print("out of time; still running:", *children.values())
    else:
        time.sleep(0.02)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
sys.exit(1 if failed else 0)
"""


def environment(**more: str) -> dict[str, str]:
    """The environment of processes that form a group, at a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return offline(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more)


def run_jobs(
    module: str,
    jobs: list[str],
    folder: Path,
    worlds: tuple[int, ...] = (1, 2),
    seconds: int = 600,
    largest: dict[str, int] | None = None,
) -> None:
    """Runs functions `job(rank, world, folder)` of a module one after the other in processes of each world size; what
    they return is read with [`result`]. largest: the most processes that a job runs in, where that is not all."""
    folder.mkdir(parents=True, exist_ok=True)
    order = json.dumps([module, jobs, str(folder), worlds, seconds, largest or {}])
    done = forks().run(_PARENT, order, seconds=seconds + 20, **environment())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


def result(folder: Path, job: str, world: int, rank: int = 0) -> Any:
    return torch.load(folder / f"{job}-{world}-{rank}.pt", weights_only=False)
