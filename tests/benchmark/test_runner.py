"""Cells are independent, stored one by one, and kept on resume."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import pytest

from hf_xformers.benchmark import children, plots, runner
from hf_xformers.benchmark.entries import Entry
from hf_xformers.benchmark.quality import Training
from hf_xformers.benchmark.report import write_report
from hf_xformers.benchmark.runner import Comparison, Settings
from hf_xformers.benchmark.worker import failure

ENTRIES = [Entry("performer", "xf_performer"), Entry("longformer", "xf_longformer")]
SETTINGS = Settings(
    lengths=(32, 16), rounds=1, tasks=("copy",), training=Training(steps=2, batch_size=2, length=9, held_out=2)
)


def fake(fails=lambda job: False):
    """A stand-in for fresh processes that keeps what it was asked."""
    jobs = []

    def perform(job, timeout=None):
        jobs.append(json.loads(json.dumps(job)))
        if fails(job):
            return {"status": "out of memory", "error": "too | much"}
        long = job.get("length", 0)
        value = {
            "time": {
                "seconds": long / 1000,
                "spread": [0.0, 1.0],
                "ratio": 0.5 if "baseline" in job else None,
                "others busy": 90.0 if long == 16 else 0.0,
            },
            "memory": long * 2**20,
            "map": {"encoder": [[1.0, 0.0], [0.5, 0.5]]},
            "train": {
                "head": "ForCausalLM",
                "parameters": 9,
                "steps": 2,
                "loss": 1.0,
                "accuracy": 0.5,
                "chance loss": 2.0,
                "chance accuracy": 0.1,
                "seconds": 3.0,
                "curve": [[0, 0.0, 2.0, 0.1], [2, 3.0, 1.0, 0.5]],
            },
        }[job["kind"]]
        return {"status": "ok", "value": value}

    return perform, jobs


def compare(monkeypatch, folder, entries=ENTRIES, settings=SETTINGS, fails=lambda job: False, **more):
    perform, jobs = fake(fails)
    monkeypatch.setattr(runner, "in_fresh_process", perform)
    comparison = Comparison(entries, settings, folder, **more)
    return comparison, list(comparison.run()), jobs


def test_all_cells(monkeypatch, tmp_path):
    _, rows, jobs = compare(monkeypatch, tmp_path)
    labels = ["dense", "performer", "longformer"]
    expected = [("speed", at, label) for at in (16, 32) for label in labels]
    twins = ["dense (performer)", "performer", "dense (longformer)", "longformer"]
    expected += [("quality", "copy", label) for label in twins] + [("map", None, label) for label in labels]
    assert [(row["kind"], row["at"], row["label"]) for row in rows] == expected
    speed = [row for row in rows if row["kind"] == "speed"]
    assert [(row["ms"], row["peak MiB"], row["time ratio"], row["memory ratio"]) for row in speed] == [
        (at, at, ratio, 1.0) for at in (16, 32) for ratio in (1.0, 0.5, 0.5)
    ]
    assert {job["entry"]["variant"] for job in jobs if job["kind"] == "time" and "baseline" not in job} == {"xf_bert"}
    # Tokens are predicted by causal models where all have one; else by each entry's own shape.
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == json.loads(json.dumps(rows))


def test_dense_attention_stands_in_the_recipe_of_each_entry(monkeypatch, tmp_path):
    """Two entries of one recipe share it; what is dense already needs none; what refuses dense attention says so."""
    entries = [
        Entry("wide", "xf_longformer"),
        Entry("narrow", "xf_longformer", {"attention": {"attention_window": 8}}),
        Entry("rotary", "xf_longformer", {"position": {"type": "rotary"}}),
        Entry("gpt2", "xf_gpt2"),
        Entry("recurrent", "xf_transformer_xl"),
    ]
    settings = dataclasses.replace(SETTINGS, lengths=(), maps=False)
    comparison, rows, jobs = compare(monkeypatch, tmp_path, entries, settings)
    assert [row["label"] for row in rows] == [
        "dense (wide)", "wide", "narrow", "dense (rotary)", "rotary", "gpt2", "dense", "recurrent",
    ]  # fmt: skip
    assert jobs[3]["entry"] == {
        "label": "dense (rotary)", "variant": "xf_longformer", "fields": {},
        "components": {"attention": {"type": "dense"}, "position": {"type": "rotary"}},
    }  # fmt: skip
    write_report(comparison)
    text = (tmp_path / "results.md").read_text()
    assert "- `narrow`: xf_longformer, attention {'attention_window': 8}\n" in text
    assert "`dense` is xf_gpt2, next to entries whose other parts refuse dense attention" in text


def test_a_cell_that_fails_stops_no_other(monkeypatch, tmp_path):
    comparison, rows, _ = compare(
        monkeypatch, tmp_path, fails=lambda job: job["entry"]["label"] == "longformer" and job.get("length") == 16
    )
    assert [row["status"] for row in rows].count("ok") == len(rows) - 1
    failed = next(row for row in rows if row["status"] != "ok")
    assert (failed["status"], failed["label"], failed["at"]) == ("out of memory", "longformer", 16)
    write_report(comparison)
    text = (tmp_path / "results.md").read_text()
    assert "longformer (encoder), speed 16: out of memory. too | much" in text
    assert "| performer | 16 | 16.00 | 0.50 | 16.00 | 1.00 | ok |" in text


@pytest.mark.parametrize(("lengths", "told"), [((16, 32), True), ((32,), False)])
def test_the_report_says_where_other_programs_ran_beside(monkeypatch, tmp_path, lengths, told):
    monkeypatch.setattr("hf_xformers.benchmark.report.psutil.cpu_count", lambda: 4)
    settings = dataclasses.replace(SETTINGS, lengths=lengths, tasks=(), maps=False)
    comparison, _, _ = compare(monkeypatch, tmp_path, settings=settings)
    write_report(comparison)
    assert ("other programs kept up to 90.0 processors busy" in (tmp_path / "results.md").read_text()) == told


def test_without_a_baseline_there_are_no_ratios(monkeypatch, tmp_path):
    _, rows, jobs = compare(monkeypatch, tmp_path, fails=lambda job: job["entry"]["label"] == "dense")
    found = [row for row in rows if row["kind"] == "speed" and row["label"] != "dense"]
    assert all(row["status"] == "ok" and row["time ratio"] is None and row["memory ratio"] is None for row in found)
    assert not any("baseline" in job for job in jobs)


def test_resume_measures_what_is_missing(monkeypatch, tmp_path):
    settings = Settings(lengths=(16,), rounds=1)
    compare(monkeypatch, tmp_path, ENTRIES[:1], settings, fails=lambda job: job["kind"] == "map")
    wider = Settings(lengths=(16, 64), rounds=1)
    comparison, rows, _ = compare(monkeypatch, tmp_path, ENTRIES, wider, resume=True)
    assert [(row["kind"], row["at"], row["label"]) for row in rows] == [
        ("speed", 16, "longformer"),
        ("speed", 64, "dense"),
        ("speed", 64, "performer"),
        ("speed", 64, "longformer"),
        *(("map", None, label) for label in ("dense", "performer", "longformer")),
    ]
    assert comparison.missing() == []
    assert [row["label"] for row in comparison.rows("speed")] == ["dense", "performer", "longformer"] * 2


def test_results_are_not_mixed_or_lost(monkeypatch, tmp_path):
    settings = Settings(lengths=(16,), rounds=1, maps=False)
    compare(monkeypatch, tmp_path, ENTRIES[:1], settings)
    refusals = [
        ({}, ENTRIES[:1], settings, "holds results already; give --resume"),
        ({"resume": True}, ENTRIES[:1], Settings(lengths=(16,), rounds=2), "setting rounds=1, not 2"),
        ({"resume": True}, [Entry("performer", "xf_longformer")], settings, "has another 'performer'"),
    ]
    for more, entries, changed, message in refusals:
        with pytest.raises(ValueError, match=message):
            Comparison(entries, changed, tmp_path, **more)
    _, rows, _ = compare(monkeypatch, tmp_path, ENTRIES[:1], settings, overwrite=True)
    assert len(rows) == 2
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="is no result of this command"):
        Comparison(ENTRIES, settings, tmp_path, resume=True)
    with pytest.raises(ValueError, match="the label 'dense' stands for two entries"):
        Comparison([Entry("dense", "xf_bert")], settings, tmp_path / "new")


def test_without_matplotlib_all_but_plots_is_written(monkeypatch, tmp_path):
    comparison, _, _ = compare(monkeypatch, tmp_path)
    monkeypatch.setattr("hf_xformers.benchmark.report.can_plot", lambda: False)
    files = write_report(comparison)
    assert files == ["results.json", "results.md", "maps/dense.svg", "maps/performer.svg", "maps/longformer.svg"]
    assert "install matplotlib" in (tmp_path / "results.md").read_text()


def test_plots(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    comparison, _, _ = compare(monkeypatch, tmp_path)
    files = write_report(comparison)
    for name in ("time", "memory", "loss", "attention_maps"):
        assert {f"{name}.png", f"{name}.svg"} <= set(files)
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()[:600]
    axes = plots.against_length(comparison.rows("speed"), "ms", "Time of a step").axes[0]
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        label: [16.0, 32.0] for label in ("dense", "performer", "longformer")
    }
    assert axes.get_xlabel() == "tokens per row"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10 ms", "20 ms", "50 ms"]


JOB = {
    "level": "layer",
    "size": "tiny",
    "batch_size": 1,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "rounds": 1,
    "max_memory": None,
    "shape": "encoder",
    "entry": Entry("x", "xf_longformer").to_dict(),
}


def test_timeout_kills_the_process():
    found = children.in_fresh_process({**JOB, "kind": "time", "length": 16}, timeout=0.3)
    assert found == {"status": "timeout", "error": "not done after 0.3 seconds"}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_limit_is_an_error_of_the_cell():
    found = children.in_fresh_process({**JOB, "kind": "time", "length": 2048, "max_memory": 10.0}, timeout=120)
    assert found["status"] == "out of memory" and "memory" in found["error"]


def test_death_without_a_word():
    assert children._died(-9, "")["status"] == "out of memory"
    found = children._died(3, "Traceback\nImportError: no torch\n")
    assert found == {"status": "failed", "error": "the process ended with exit code 3: ImportError: no torch"}
    assert failure(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))["status"] == "out of memory"
    assert failure(ValueError("no such\nthing")) == {"status": "failed", "error": "no such thing"}
    assert failure(SystemError("error return without exception set"))["status"] == "out of memory"
    assert failure(KeyError("x"))["error"] == "KeyError: 'x'"


def test_processes_find_this_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = children._environment(2)
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["elsewhere"] and environment["OMP_NUM_THREADS"] == "2"
