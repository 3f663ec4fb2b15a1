"""Times are paired, and peaks are what a call really takes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections import namedtuple
from datetime import date
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_xformers.benchmark import measure
from hf_xformers.benchmark.measure import (
    Bystanders,
    forked_memory,
    interleaved_seconds,
    machine,
    memory_in_fresh_process,
    process_status,
    ratios,
)
from hf_xformers.benchmark.tables import write_dated

linux = pytest.mark.skipif(sys.platform != "linux", reason="resident sizes come from /proc")
MIB = 2**20


def test_calls_take_turns_and_warm_up_is_not_counted():
    order, now = [], [0.0]

    def call(name, cost):
        def run():
            order.append(name)
            now[0] += cost * (10 if len(order) <= 2 else 1)

        return run

    seconds = interleaved_seconds({"a": call("a", 1.0), "b": call("b", 3.0)}, 2, device="cpu", clock=lambda: now[0])
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [3.0, 3.0]}


class Processor:
    """A machine of two processors of which other programs keep `others` busy, as psutil tells of it."""

    def __init__(self, others: float) -> None:
        self.now, self.others = 0.0, others

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def cpu_times(self):
        return Times(user=(1 + self.others) * self.now, system=0.0, idle=(1 - self.others) * self.now)

    def cpu_count(self) -> int:
        return 2

    def Process(self):
        times = Times(user=self.now, system=0.0, idle=0.0)
        return SimpleNamespace(cpu_times=lambda: times, memory_info=lambda: SimpleNamespace(rss=0))

    def virtual_memory(self):
        return SimpleNamespace(available=MIB)


Times = namedtuple("Times", "user system idle")


@pytest.mark.parametrize("others", [0.0, 0.15, 0.9])
def test_a_measurement_beside_other_programs_says_so(others, monkeypatch):
    processor = Processor(others)
    monkeypatch.setattr(measure, "psutil", processor)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: processor.now)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seconds = interleaved_seconds({"a": lambda: processor.pass_by(1.0)}, 2, device="cpu", clock=lambda: 0.0)
    assert seconds.others_busy == pytest.approx(others)
    assert [f"{others:.1f} processors busy" in str(one.message) for one in told] == ([True] if others > 0.2 else [])


def test_what_is_too_short_to_tell_is_not_told(monkeypatch):
    processor = Processor(0.9)
    monkeypatch.setattr(measure, "psutil", processor)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: processor.now)
    bystanders = Bystanders()
    processor.pass_by(0.1)
    assert bystanders.busy() == 0
    processor.pass_by(0.9)
    assert bystanders.busy() == pytest.approx(0.9)


def test_other_programs_are_counted_on_this_machine():
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        bystanders, deadline, busy = Bystanders(), time.monotonic() + 30, 0.0
        while busy < 0.2 and time.monotonic() < deadline:
            time.sleep(0.2)
            busy = bystanders.busy()
    finally:
        burner.kill()
        burner.wait()
    assert 0.2 <= busy <= psutil.cpu_count()


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    seconds = {"dense": [1.0, 10.0, 2.0], "other": [2.0, 30.0, 2.0]}
    assert ratios(seconds, "dense") == {"dense": 1.0, "other": 2.0}


def test_machine_says_where():
    assert {"device", "threads", "torch", "transformers", "python"} <= set(machine("cpu"))


def test_a_row_keeps_the_day_on_which_it_was_measured(tmp_path):
    path, before = tmp_path / "made.json", {"case": "a", "ms": 1.5}
    path.write_text(json.dumps({"rows": [{**before, "measured": "2020-01-31"}, {"case": "b", "ms": 2.5}]}))
    write_dated(path, {"machine": {}, "rows": [before, {"case": "b", "ms": 2.75}]})
    first, second = json.loads(path.read_text())["rows"]
    assert first == {**before, "measured": "2020-01-31"} and second["measured"] == date.today().isoformat()


def allocating(mib):
    """A call whose peak is `mib`, in pieces that it holds together."""

    def run():
        held = [torch.ones(MIB // 4) for _ in range(mib)]
        del held

    return run


def failing():
    raise ValueError("cannot be made")


@linux
def test_timed_calls_keep_their_pages():
    """In a process of its own, whose heap stays as it is afterwards: after the first round no page is handed out
    anew, but for what the system takes back from a round on its own account."""
    code = """
        import resource, torch
        from hf_xformers.benchmark.measure import interleaved_seconds

        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        seen = []

        def call():
            before = faults()
            sum(torch.ones(2**24) for _ in range(3))
            seen.append(faults() - before)

        interleaved_seconds({"a": call}, 9, device="cpu")
        print(*seen)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    first, *others = (int(number) for number in found.stdout.split())
    assert first > 100 * statistics.median(others)


@pytest.mark.parametrize("measure", [forked_memory, memory_in_fresh_process])
def test_peak_of_a_call(measure):
    more = {} if measure is forked_memory else {"repeats": 1}
    small, large = measure(allocating, 20, **more), measure(allocating, 60, **more)
    assert abs(small - 20 * MIB) < 3 * MIB and abs(large - 60 * MIB) < 3 * MIB


@linux
def test_an_error_in_the_child_is_one_here():
    """What dies without a word is not waited for."""
    with pytest.raises(RuntimeError, match="ValueError: cannot be made"):
        forked_memory(failing)
    with pytest.raises(RuntimeError, match="ended with exit code 9"):
        forked_memory(os._exit, 9)
    with pytest.raises(RuntimeError, match="not done after 0.1 seconds"):
        forked_memory(time.sleep, 60, timeout=0.1)


@linux
def test_process_status():
    assert process_status("VmRSS") > MIB
    with pytest.raises(OSError, match="VmNone"):
        process_status("VmNone")
