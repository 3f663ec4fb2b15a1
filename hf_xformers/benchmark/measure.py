# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of callables, side by side in one run, as ratios to a baseline.

Times are interleaved (A B C, A B C, ...) so that a machine whose speed drifts treats all alike; the figure is the
median of pairwise ratios. On a CPU they are processor seconds, which other programs on the machine disturb least; on
CUDA, seconds between two events on the device. Memory is the growth of the process's peak resident size over one call,
measured in a fresh process (Linux: the peak counter is reset first); on CUDA, the allocator's peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

# glibc moves the size from which a block gets pages of its own (and gives them back when freed) upwards as a program
# runs; then what a call freed stays with the heap and hides in the next call's growth.
_M_MMAP_THRESHOLD, _OWN_PAGES_FROM = -3, 1 << 20
_M_TRIM_THRESHOLD, _NEVER = -1, (1 << 31) - 1
_BLOCK = 1 << 26
QUIET = 0.1  # of all processors


def machine(device: str | None = None) -> dict[str, Any]:
    """What a stored result must say about where it was measured. device: cpu or cuda; None: CUDA where there is
    one."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if on_cuda(device) else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name, which `platform` has on Windows and macOS alone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def on_cuda(device: str | None) -> bool:
    """Whether figures are CUDA's: on request, or because there is such a device."""
    return torch.cuda.is_available() if device is None else device == "cuda"


# ------------------------------------------------------------------------------------------------ time


class Seconds(dict[str, list[float]]):
    """Seconds of each call, and how many processors other programs kept busy meanwhile."""

    others_busy: float = 0.0


class Bystanders:
    """How many processors all other programs have kept busy since this was made."""

    def __init__(self) -> None:
        self._begun, self._busy = time.perf_counter(), self._seconds()

    @staticmethod
    def _seconds() -> float:
        everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = sum(getattr(everybody, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        return sum(everybody) - idle - own.user - own.system

    def busy(self) -> float:
        passed = time.perf_counter() - self._begun
        if passed < 0.2:
            return 0.0  # the system counts in hundredths of a second, which says nothing here
        return min(max(self._seconds() - self._busy, 0.0) / passed, float(psutil.cpu_count() or 1))


def interleaved_seconds(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int = 5,
    warmup: int = 1,
    *,
    device: str | None = None,
    clock: Callable[[], float] = time.process_time,
) -> Seconds:
    """Seconds of each call, `rounds` times in turn after `warmup` uncounted rounds. clock: the one on a CPU.

    On a CPU, memory that is freed stays with this process from now on ([`keep_freed_memory`]).

    Warns where other programs kept more than `QUIET` of the processors busy: they share the way to memory, so that a
    call that lives by it seems slower than it is next to one that computes.
    """
    seconds = Seconds((name, []) for name in calls)
    cuda = on_cuda(device)
    once = _cuda_seconds if cuda else lambda call: _cpu_seconds(call, clock)
    with contextlib.nullcontext() if cuda else keep_freed_memory():
        for call in [*calls.values()] * warmup:
            once(call)
    bystanders = Bystanders()
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(once(call))
    seconds.others_busy = bystanders.busy()
    if seconds.others_busy > QUIET * (psutil.cpu_count() or 1):
        warnings.warn(
            f"other programs kept {seconds.others_busy:.1f} processors busy during a measurement: ratios of what goes "
            "through memory come out too high; measure again when the machine is quiet",
            stacklevel=2,
        )
    return seconds


def _cpu_seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def _cuda_seconds(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def ratios(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Median over rounds of each call's time divided by the baseline's in the same round."""
    base = seconds[baseline]
    return {name: statistics.median(a / b for a, b in zip(runs, base, strict=True)) for name, runs in seconds.items()}


# ------------------------------------------------------------------------------------------------ memory


def state_tensors(cache: Any) -> list[Tensor]:
    """What a generation cache keeps of the texts so far: the floating-point tensors of its layers, of layers and
    memories within them as well, each once; without what a layer calls `derived`."""
    seen: dict[int, Any] = {}

    def walk(value: Any) -> None:
        if id(value) in seen or isinstance(value, (type, torch.nn.Module)):
            return
        seen[id(value)] = value
        parts: Iterable[Any] = ()
        if isinstance(value, (list, tuple)):
            parts = value
        elif isinstance(value, Mapping):
            parts = value.values()
        elif not isinstance(value, Tensor):
            derived = getattr(value, "derived", ())
            parts = [part for name, part in getattr(value, "__dict__", {}).items() if name not in derived]
        for part in parts:
            walk(part)

    walk(cache.layers)
    return [value for value in seen.values() if isinstance(value, Tensor) and value.is_floating_point()]


def process_status(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS, VmHWM, VmData. Raises OSError where there is none."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"{field} is not in /proc/self/status; memory is measured on Linux only")


def measures_memory(device: str | None = None) -> bool:
    """Whether [`peak_growth`] works here: with CUDA anywhere, on a CPU under Linux."""
    return on_cuda(device) or sys.platform == "linux"


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """What is freed stays with the process as long as it lives, and the heap gets once more what it grew by inside, at
    most half of what the machine has left (glibc; elsewhere nothing).

    Otherwise every large tensor takes new pages from the system now and then, as the heap happens to lie, and a page
    costs more than writing to it does: the same call took up to a half longer from one round to the next.
    """
    if not _set_heap((_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER)):
        yield
        return
    before = psutil.Process().memory_info().rss
    yield
    grown = psutil.Process().memory_info().rss - before
    spare = min(grown, psutil.virtual_memory().available // 2)
    # Calls leave gaps of different sizes to each other, so that a heap keeps growing for some rounds.
    blocks = [torch.ones(_BLOCK, dtype=torch.uint8) for _ in range(max(spare, 0) // _BLOCK + 1)]
    del blocks


def steady_heap() -> None:
    """Gives blocks of a MiB and more pages of their own, as long as the process lives (glibc; elsewhere nothing)."""
    _set_heap((_M_MMAP_THRESHOLD, _OWN_PAGES_FROM))


def _set_heap(*options: tuple[int, int]) -> bool:
    """Whether the heap could be told so."""
    mallopt = getattr(_c_library(), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) for option, value in options)


def _c_library() -> Any:
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def peak_growth(call: Callable[[], Any], device: str | None = None) -> int:
    """Bytes by which the peak memory of one call exceeds what was in use before it (after one warm-up call)."""
    call()
    if on_cuda(device):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)  # else freed pages of the warm-up hide the growth
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = process_status("VmRSS")
    call()
    return process_status("VmHWM") - before


def _memory_child(make: Callable[..., Callable[[], Any]], arguments: tuple, threads: int, found: Any) -> None:
    torch.set_num_threads(threads)
    steady_heap()
    try:
        found.send(peak_growth(make(*arguments)))
    except Exception as error:
        found.send(f"{type(error).__name__}: {error}")


def _in_child(kind: str, make: Callable[..., Callable[[], Any]], arguments: tuple, timeout: float) -> int:
    context: Any = multiprocessing.get_context(kind)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_memory_child, args=(make, arguments, torch.get_num_threads(), there))
    child.start()
    there.close()
    try:
        result = here.recv() if here.poll(timeout) else f"not done after {timeout:g} seconds"
    except EOFError:  # the system has killed it, as it does when memory runs out
        child.join()
        result = f"the process ended with exit code {child.exitcode}"
    child.kill()
    child.join()
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def memory_in_fresh_process(
    make: Callable[..., Callable[[], Any]], *arguments: Any, timeout: float = 300.0, repeats: int = 3
) -> int:
    """Peak growth in bytes of `make(*arguments)()` in a process of its own (median of `repeats`)."""
    return int(statistics.median(_in_child("spawn", make, arguments, timeout) for _ in range(repeats)))


def forked_memory(make: Callable[..., Callable[[], Any]], *arguments: Any, timeout: float = 600.0) -> int:
    """As [`memory_in_fresh_process`], once, in a fork of this process: quick, but only before any backward pass
    here."""
    return _in_child("fork", make, arguments, timeout)
