# SPDX-License-Identifier: Apache-2.0
"""A fresh process that measures one thing: `python -m hf_xformers.benchmark.worker RESULT < JOB`, both JSON.

RESULT holds `{"value": ...}`, or `{"status": "out of memory" or "failed", "error": one line}`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.out_of_memory import is_out_of_memory


def main() -> int:
    job = json.load(sys.stdin)
    result = Path(sys.argv[1])
    try:
        found = {"value": perform(job)}
    except Exception as error:
        found = failure(error)
    result.write_text(json.dumps(found), encoding="utf-8")
    return 0


def failure(error: Exception) -> dict[str, str]:
    """What is reported about an error: whether memory was short, and one line."""
    text = " ".join(str(error).split())
    short = is_out_of_memory(error) or isinstance(error, SystemError)  # of extensions that ask for memory in vain
    told = text if isinstance(error, ValueError) and text else ": ".join(filter(None, (type(error).__name__, text)))
    if short and (not text or isinstance(error, SystemError)):
        told = "memory ran out while the model was made or run"
    return {"status": "out of memory" if short else "failed", "error": told[:500]}


def perform(job: dict[str, Any]) -> Any:
    """Runs a job; `kind` says which."""
    import torch

    from ..core.precision import allow_tf32

    torch.set_num_threads(job["threads"])
    if job["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; take `--device cpu`")
    if job["device"] == "cuda":
        allow_tf32()
    jobs: dict[str, Callable[[dict[str, Any]], Any]] = {
        "time": seconds,
        "memory": memory,
        "train": train,
        "map": attention_map,
    }
    return jobs[job["kind"]](job)


def limit_memory(limit_mib: float | None, device: str) -> None:
    """From here on this process may take so many MiB more; what asks for more is an error of its own, not of the
    machine."""
    if limit_mib is None:
        return
    limit = int(limit_mib * 2**20)
    if device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
        return
    import resource

    from .measure import process_status

    ceiling = process_status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))


def _step(job: dict[str, Any], entry: dict[str, Any]) -> Callable[[], Any]:
    from .entries import Entry
    from .steps import step

    names = ("level", "size", "batch_size", "dtype", "device")
    return step(Entry(**entry), job["shape"], job["length"], **{name: job[name] for name in names})


def seconds(job: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a step and, next to a baseline, the median of the paired ratios."""
    from .measure import interleaved_seconds, ratios

    limit_memory(job["max_memory"], job["device"])
    calls = {name: _step(job, job[name]) for name in ("baseline", "entry") if job.get(name) is not None}
    clock = time.process_time if job["threads"] == 1 else time.perf_counter
    spent = interleaved_seconds(calls, job["rounds"], device=job["device"], clock=clock)
    found = {
        "seconds": statistics.median(spent["entry"]),
        "spread": _spread(spent["entry"]),
        "others busy": spent.others_busy,
    }
    return {**found, "ratio": ratios(spent, "baseline")["entry"] if "baseline" in spent else None}


def _spread(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def memory(job: dict[str, Any]) -> int | None:
    """Bytes by which the peak grows over one step; None where that cannot be measured."""
    from .measure import measures_memory, peak_growth, steady_heap

    if not measures_memory(job["device"]):
        return None
    if job["device"] == "cpu":
        steady_heap()
    limit_memory(job["max_memory"], job["device"])
    return peak_growth(_step(job, job["entry"]), job["device"])


def train(job: dict[str, Any]) -> dict[str, Any]:
    from .entries import Entry
    from .quality import Training, train_on

    limit_memory(job["max_memory"], job["device"])
    training = Training(**job["training"])
    return train_on(Entry(**job["entry"]), job["shape"], job["task"], training, job["data"], job["device"])


def attention_map(job: dict[str, Any]) -> dict[str, Any]:
    from ..hub.attention_map import attention_maps
    from ..training.building import SHAPES
    from .entries import Entry

    entry = Entry(**job["entry"])
    maps = attention_maps(entry.config_class, {**SHAPES[job["shape"]], **entry.components, **entry.fields})
    return {name: weights.tolist() for name, weights in maps.items()}


if __name__ == "__main__":
    sys.exit(main())
