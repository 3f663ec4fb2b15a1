# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own: what fails, hangs or takes too much memory there stops nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def in_fresh_process(job: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Runs a job of [`hf_xformers.benchmark.worker`].

    Returns `{"status": "ok", "value": ...}`, or `status` (out of memory, timeout, failed) and `error`, one line.
    """
    with tempfile.TemporaryDirectory(prefix="hf_xformers-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-P", "-m", "hf_xformers.benchmark.worker", str(result)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(int(job["threads"])),
        )
        try:
            _, errors = child.communicate(json.dumps(job), timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"status": "timeout", "error": f"not done after {timeout:g} seconds"}
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        if result.exists():
            return {"status": "ok", **json.loads(result.read_text(encoding="utf-8"))}
    return _died(child.returncode, errors)


def _died(code: int, errors: str) -> dict[str, Any]:
    """A process that left no result: killed (mostly for its memory), or it could not start."""
    if code == -signal.SIGKILL:
        return {"status": "out of memory", "error": "the system killed the process, as it does when memory runs out"}
    last = [line for line in errors.strip().splitlines() if line.strip()][-1:] or ["it wrote nothing"]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"status": "failed", "error": f"the process ended with {how}: {last[0][:300]}"}


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
