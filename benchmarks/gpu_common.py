"""What the GPU benchmarks share: facts about the device, timing by events, peaks of memory, results row by row.

Without a GPU everything runs on the processor, at sizes that only show that the code works.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hf_xformers.benchmark import tables
from hf_xformers.core.saved_files import write_text

NOT_READY = "gpu_not_ready.json"  # cases whose kernels take too long to compile, written by gpu_ready.py
RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """The device, its driver, and the versions that a figure depends on."""
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": "processor"}
    if DEVICE.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("torch", "triton", "transformers", "accelerate", "flash-linear-attention")
    return {**found, **{name: _version(name) for name in packages if _version(name)}}


def parse(description: str | None, tuned: Iterable[str] = ()) -> argparse.Namespace:
    """--output_dir and --minutes, which every part has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=3.0, help="no further case is begun after this time")
    parser.add_argument("--only", default="", help="parts of the names of cases, separated by commas")
    if tuned:
        parser.add_argument("--tune", choices=list(tuned), help="only have this case's kernels compiled")
    return parser.parse_args()


def wanted(name: str, arguments: argparse.Namespace) -> bool:
    return not arguments.only or any(part in name for part in arguments.only.split(","))


class Rows:
    """Rows of one part, stored after each, so that a run that is cut off keeps what it has."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.path = arguments.output_dir / f"{name}.json"
        self.end = time.monotonic() + 60 * arguments.minutes
        self.rows: list[dict[str, Any]] = []
        self.machine = facts()
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        late = arguments.output_dir / NOT_READY
        self.not_ready = set(json.loads(late.read_text()) if late.exists() else [])

    def out_of_time(self) -> bool:
        return time.monotonic() > self.end

    def add(self, row: dict[str, Any], shown: bool = True) -> None:
        self.rows.append(row)
        self.store()
        if shown:
            print("  ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))

    def store(self) -> None:
        tables.write_dated(self.path, {"machine": self.machine, "rows": self.rows})

    def page(self, title: str, note: str, columns: list[str]) -> None:
        """The Markdown page next to the JSON."""
        told = ", ".join(f"{name} {value}" for name, value in self.machine.items() if name != "device")
        text = f"# {title}\n\n{note}\n\nMeasured on {self.machine['device']}: {told}.\n\n"
        measured = [row for row in self.rows if "error" not in row and "note" not in row]
        text += tables.folded(measured, columns, self.path.stem) + "\n"
        failed: dict[str, list[str]] = {}
        for row in self.rows:
            if "error" in row:
                failed.setdefault(row["error"].splitlines()[0], []).append(str(row.get("case", row.get("model"))))
        for error, names in failed.items():
            text += f"\nNot measured: {', '.join(dict.fromkeys(names))} ({error})\n"
        write_text(self.path.with_suffix(".md"), text)


def milliseconds(step: Callable[[], Any], seconds: float = 0.25) -> float:
    """Median time of a step that has run before, over as many repeats as fit into `seconds` (5 at least)."""
    taken: list[float] = []
    end = time.monotonic() + seconds
    while len(taken) < 5 or (time.monotonic() < end and len(taken) < 50):
        if DEVICE.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            torch.cuda.synchronize()
            taken.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            step()
            taken.append(1000 * (time.perf_counter() - begun))
        if len(taken) == 1 and taken[0] > 1000:
            break
    return statistics.median(taken)


def peak_mib(step: Callable[[], Any]) -> float | None:
    """What one step needs beyond what is held before it; None on a processor."""
    if DEVICE.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
