"""Time and peak memory of callables, side by side in one run, as ratios to a baseline.

Times are interleaved (A B C, A B C, ...) so that a machine whose speed drifts treats all alike; the figure is the median of
pairwise ratios. On a CPU they are processor seconds, which other programs on the machine disturb least; on CUDA, wall
seconds between synchronisations. Memory is the growth of the process's peak resident size over one call, measured in a fresh process
(Linux: the peak counter is reset first); on CUDA, the allocator's peak.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What a committed result must say about where it was measured."""
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def interleaved_seconds(
    calls: dict[str, Callable[[], Any]], rounds: int = 5, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times in turn after `warmup` uncounted rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for index in range(warmup + rounds):
        for name, call in calls.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = clock()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if index >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], baseline: str) -> dict[str, float]:
    """Median over rounds of each call's time divided by the baseline's in the same round."""
    base = seconds[baseline]
    return {name: statistics.median(a / b for a, b in zip(runs, base, strict=True)) for name, runs in seconds.items()}


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"{field} is not in /proc/self/status; memory is measured on Linux only")


def peak_growth(call: Callable[[], Any]) -> int:
    """Bytes by which the peak memory of one call exceeds what was in use before it (after one warm-up call)."""
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed pages of the warm-up hide the growth
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _memory_child(make: Callable[..., Callable[[], Any]], arguments: tuple, threads: int, queue) -> None:
    torch.set_num_threads(threads)
    try:
        queue.put(peak_growth(make(*arguments)))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def memory_in_fresh_process(
    make: Callable[..., Callable[[], Any]], *arguments: Any, timeout: float = 300.0, repeats: int = 3
) -> int:
    """Peak growth in bytes of `make(*arguments)()` in a process of its own (median of `repeats`)."""
    context = multiprocessing.get_context("spawn")
    found = []
    for _ in range(repeats):
        queue = context.Queue()
        child = context.Process(target=_memory_child, args=(make, arguments, torch.get_num_threads(), queue))
        child.start()
        result = queue.get(timeout=timeout)
        child.join()
        if isinstance(result, str):
            raise RuntimeError(result)
        found.append(result)
    return int(statistics.median(found))


def forked_memory(make: Callable[..., Callable[[], Any]], *arguments: Any, timeout: float = 600.0) -> int:
    """As [`memory_in_fresh_process`], once, in a fork of this process: quick, but only before any backward pass here."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_memory_child, args=(make, arguments, torch.get_num_threads(), queue))
    child.start()
    result = queue.get(timeout=timeout)
    child.join()
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def write_results(name: str, rows: list[dict[str, Any]], columns: list[str], title: str, note: str) -> Path:
    """Writes `results/<name>.json` and `results/<name>.md` beside this file."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    about = machine()
    (folder / f"{name}.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    lines = [
        f"# {title}",
        "",
        note,
        "",
        f"Measured on {about['device']}, {about['threads']} thread(s), float32 unless said, ",
    ]
    lines[-1] += f"torch {about['torch']}, transformers {about['transformers']}."
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |")
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.md"


if os.environ.get("OMP_NUM_THREADS") is None:
    torch.set_num_threads(1)
