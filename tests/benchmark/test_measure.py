"""Times are paired, and peaks are what a call really takes."""

from __future__ import annotations

import sys

import pytest
import torch

from hf_xformers.benchmark.measure import (
    forked_memory,
    interleaved_seconds,
    machine,
    memory_in_fresh_process,
    process_status,
    ratios,
)

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


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    seconds = {"dense": [1.0, 10.0, 2.0], "other": [2.0, 30.0, 2.0]}
    assert ratios(seconds, "dense") == {"dense": 1.0, "other": 2.0}


def test_machine_says_where():
    assert {"device", "threads", "torch", "transformers", "python"} <= set(machine("cpu"))


def allocating(mib):
    """A call whose peak is `mib`, in pieces that it holds together."""

    def run():
        held = [torch.ones(MIB // 4) for _ in range(mib)]
        del held

    return run


def failing():
    raise ValueError("cannot be made")


@linux
@pytest.mark.parametrize("measure", [forked_memory, memory_in_fresh_process])
def test_peak_of_a_call(measure):
    more = {} if measure is forked_memory else {"repeats": 1}
    small, large = measure(allocating, 20, **more), measure(allocating, 60, **more)
    assert abs(small - 20 * MIB) < 3 * MIB and abs(large - 60 * MIB) < 3 * MIB


@linux
def test_an_error_in_the_child_is_one_here():
    with pytest.raises(RuntimeError, match="ValueError: cannot be made"):
        forked_memory(failing)


@linux
def test_process_status():
    assert process_status("VmRSS") > MIB
    with pytest.raises(OSError, match="VmNone"):
        process_status("VmNone")
