"""Scripts in processes of their own that begin where the imports are done: a process that has them forks for each.

A fresh interpreter spends six seconds on torch and transformers before it does anything. What is to be shown of the
imports themselves, or of the command line, takes one all the same.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What takes the time. This package is not among them: scripts decide whether and how they import it.
LIBRARIES = ("torch", "transformers.trainer", "torch.distributed.fsdp", "accelerate.utils", "peft", "datasets")

_SERVER = """
import gc, importlib, json, os, signal, sys, traceback

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import torch
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what all processes share is not looked through in each


def script(order):
    signal.alarm(order["seconds"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY), number)
    sys.argv[1:] = order["arguments"]
    exec(compile(order["code"], "<script>", "exec"), {"__name__": "__main__"})


for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            script(order)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """A process that has imported the libraries under `environment`, and runs scripts one after the other in forks."""

    def __init__(self, environment: Mapping[str, str]):
        command = [sys.executable, "-c", _SERVER, json.dumps(LIBRARIES)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=dict(environment), text=True, **pipes)
        self.environment = dict(environment)
        atexit.register(self.close)

    def run(
        self, code: str, *arguments: str, folder: Path | None = None, seconds: int = 280, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """What `python -c CODE ARGUMENTS` would give in `folder`. What libraries read of the environment when they are
        imported stays as it was then."""
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "out", Path(place) / "err"
            out.touch(), err.touch()
            order = {
                "code": code,
                "arguments": arguments,
                "folder": str(folder or ROOT),
                "environment": {**self.environment, **environment},
                "out": str(out),
                "err": str(err),
                "seconds": seconds,
            }
            try:
                self.process.stdin.write(json.dumps(order) + "\n")
                self.process.stdin.flush()
                status = self.process.stdout.readline()
            except BaseException:  # the time of a test is up: what comes later would be taken for the next answer
                self.process.kill()
                self.process.wait()
                raise
            assert status, "the process that forks has ended"
            return subprocess.CompletedProcess([code, *arguments], int(status), out.read_text(), err.read_text())

    def close(self) -> None:
        if self.process.stdin.closed:
            return
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def offline(**more: str) -> dict[str, str]:
    """This process's environment for children that know neither the Hub nor a GPU, and one thread."""
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **fixed, "CUDA_VISIBLE_DEVICES": "", **more}


@functools.cache
def _shared() -> Forks:
    return Forks(offline())


def forks() -> Forks:
    """The one that all tests share, which does not know the Hub."""
    if _shared().process.poll() is not None:
        _shared.cache_clear()
    return _shared()
