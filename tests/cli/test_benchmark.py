"""`hf-xformers benchmark` as a user runs it."""

from __future__ import annotations

import json
import re

import pytest

from hf_xformers.benchmark import runner
from hf_xformers.benchmark.entries import Entry, dense_twin, make_config
from hf_xformers.benchmark.plots import can_plot
from hf_xformers.cli import main
from hf_xformers.cli.benchmark import make_parser, read_entries, read_settings
from hf_xformers.hub.attention_map import attention_maps
from hf_xformers.hub.sweep import best_of_sweep
from tests.forks import forks

# A job of the benchmark where the imports are done.
WORKER = """
import io, sys
from hf_xformers.benchmark.worker import main
sys.stdin = io.StringIO(sys.argv.pop())
main()
"""


@pytest.fixture
def forked(monkeypatch, tmp_path_factory):
    """Jobs are measured in forks; but for the memory of dense attention, which has a fresh process, as all have for a
    user."""
    place, fresh, jobs = tmp_path_factory.mktemp("worker"), runner.in_fresh_process, []

    def measure(job, timeout):
        jobs.append(job)
        if job["kind"] == "memory" and job["entry"]["label"] == "dense":
            return fresh(job, timeout)
        result = place / f"{len(jobs)}.json"
        done = forks().run(WORKER, str(result), json.dumps(job))
        assert done.returncode == 0, done.stderr
        return {"status": "ok", **json.loads(result.read_text())}

    monkeypatch.setattr(runner, "in_fresh_process", measure)
    return jobs


@pytest.mark.slow
def test_a_comparison(tmp_path, capsys, forked):
    folder = tmp_path / "out"
    command = ["benchmark", "--variants", "narrow=longformer", "--set", "narrow.attention.attention_window=4"]
    command += ["--lengths", "16", "--rounds", "1", "--encoder", "--output_dir", str(folder)]
    assert main([*command, "--no_maps"]) == 0
    results = json.loads((folder / "results.json").read_text())
    assert {"device", "threads", "torch", "transformers", "python"} <= set(results["machine"])
    assert [(row["label"], row["variant"], row["at"], row["status"]) for row in results["rows"]] == [
        ("dense", "xf_bert", 16, "ok"),
        ("narrow", "xf_longformer", 16, "ok"),
    ]
    assert all(row["ms"] > 0 and row["time ratio"] > 0 and row["peak MiB"] > 0 for row in results["rows"])
    assert results["entries"]["narrow"]["components"] == {"attention": {"attention_window": 4}}
    shown = capsys.readouterr()
    assert "narrow" in shown.out and "results.md" in shown.err
    # more, in the same folder
    assert main([*command, "--resume"]) == 0
    assert "2 of 4 cells are there already" in " ".join(capsys.readouterr().err.split())
    rows = json.loads((folder / "results.json").read_text())["rows"]
    maps = {row["label"]: row["maps"]["encoder"] for row in rows if row["kind"] == "map"}
    assert [len(weights) for weights in maps.values()] == [16, 16]
    assert maps["dense"][5][15] > 0 and maps["narrow"][5][15] == maps["narrow"][5][8] == 0 < maps["narrow"][5][7]
    assert (folder / "maps" / "narrow.svg").read_text().startswith("<svg")
    assert [job["kind"] for job in forked] == ["memory", "time", "memory", "time", "map", "map"]


def test_a_comparison_without_a_figure_fails(tmp_path, monkeypatch):
    """Whether attention maps were drawn, or another length was measured before."""

    def measure(job, timeout):
        drawn = {"status": "ok", "value": {"encoder": [[1.0]]}}
        return drawn if job["kind"] == "map" else {"status": "out of memory", "error": "no memory"}

    monkeypatch.setattr(runner, "in_fresh_process", measure)
    command = ["benchmark", "--variants", "performer", "--encoder", "--output_dir", str(tmp_path)]
    assert main([*command, "--lengths", "16"]) == 1
    stored = tmp_path / "results.json"
    stored.write_text(stored.read_text().replace('"out of memory"', '"ok"'))
    assert main([*command, "--lengths", "32", "--resume"]) == 1


@pytest.mark.slow
def test_training_only(tmp_path, forked):
    command = ["benchmark", "--variants", "performer", "--train_only", "--tasks", "mqar", "--steps", "3", "--no_maps"]
    command += [*"--train_batch_size 4 --train_hidden_size 16 --train_layers 1 --output_dir".split(), str(tmp_path)]
    assert main(command) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["label"], row["shape"], row["head"], row["status"]) for row in rows] == [
        ("dense (performer)", "decoder", "ForCausalLM", "ok"),
        ("performer", "decoder", "ForCausalLM", "ok"),
    ]
    assert all(0 <= row["accuracy"] <= 1 and row["curve"][-1][0] == 3 for row in rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--variants", "longfromer"], r"there is no variant 'longfromer'\. Did you mean 'longformer'\?"),
        (["--variants", "lolcats"], "a component: write lolcats=xformer and --set lolcats.attention=lolcats"),
        (["--variants", ","], "argument --variants: ',' names nothing"),
        (["--variants", "a=bert,a=longformer"], "the label 'a' stands for two entries"),
        (["--variants", "dense=bert"], "the label 'dense' stands for two entries"),
        (["--variants", "vision_transformer"], "reads images"),
        (["--variants", "t5", "--causal"], "'xf_t5' has no decoder class"),
        (["--variants", "bert", "--lengths", "512,1k"], "argument --lengths: '1k' is no number of tokens"),
        (["--variants", "bert", "--lengths", "0"], "'0' is no number of tokens"),
        (["--variants", "bert", "--rounds", "0"], "argument --rounds: 0 is too small"),
        (["--variants", "bert", "--timeout", "0"], "argument --timeout: 0 must be greater than 0"),
        (["--variants", "bert", "--train", "--tasks", "mqra"], r"unknown task 'mqra'\. Did you mean 'mqar'\?"),
        (["--variants", "bert", "--train", "--train_length", "4"], "task 'mqar' needs at least 5 tokens, not 4"),
        (
            ["--variants", "bert", "--train_heads", "3"],
            "--train_hidden_size 64 cannot be divided among --train_heads 3",
        ),
        (["--variants", "bert", "--set", "bert.attention"], "is not of the form LABEL.OPTION=VALUE"),
        (["--variants", "bert", "--set", "gpt.attention=x"], "is about 'gpt', which is none of bert"),
        (
            ["--variants", "bert", "--set", "bert.attentoin=x"],
            r"no component or field 'attentoin'\. Did you mean 'attention",
        ),
        (["--variants", "bert", "--set", "bert.attention.window=4"], "Unknown field 'window' of attention 'dense'"),
        (
            ["--variants", "bert", "--set", "bert.num_key_value_heads=x"],
            "--set bert.num_key_value_heads: 'x' is no valid",
        ),
        (
            ["--variants", "bert", "--level", "block"],
            "argument --level: there is no 'block'. Choose from layer, model",
        ),
        (["--lengths", "16"], "the following arguments are required: --variants"),
        (["--variants", "t5", "--suite", "recall"], "'xf_t5' has no decoder class"),
        (["--variants", "t5", "--train", "--tasks", "parity"], "a task is for models of the shape decoder, and"),
        (["--variants", "bert", "--train_hidden_size", "64,9"], "--train_hidden_size 9 cannot be divided among"),
        (["--variants", "bert", "--learning_rate", "0.1,0"], "argument --learning_rate: 0 must be greater than 0"),
        (["--variants", "bert", "--seed", "1,x"], "argument --seed: "),
        (["--variants", "bert", "--train", "--seed", "1,-1"], "argument --seed: -1 is too small; take at least 0"),
        (["--variants", "bert", "--tasks", "copy"], "--tasks is about training; add --train"),
        (["--variants", "bert", "--resume", "--overwrite_output_dir"], "overwrite_output_dir begins again; drop one"),
    ],
)
def test_refusals(tmp_path, capsys, arguments, message):
    assert main(["benchmark", *arguments, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error
    assert not (tmp_path / "out" / "results.json").exists()


def test_options_reach_the_settings(tmp_path):
    options = make_parser().parse_args(
        "--variants bert --output_dir x --lengths 8,4 --level model --size small --batch-size 3 --dtype bfloat16"
        " --seq2seq --max-memory 100 --train --tasks all --steps 7 --learning_rate 0.5 --seed 5".split()
    )
    settings = read_settings(options)
    assert (settings.lengths, settings.level, settings.size, settings.batch_size) == ((8, 4), "model", "small", 3)
    assert (settings.dtype, settings.shape, settings.max_memory) == ("bfloat16", "seq2seq", 100.0)
    assert settings.tasks == ("copy", "mqar", "recall", "two_hop", "listops", "retrieval", "text")
    assert (settings.training.steps, settings.training.learning_rate, settings.training.seed) == (7, 0.5, 5)
    assert not settings.sweep and settings.points() == [{}]
    suite = "--variants bert --output_dir x --suite recall --train_only --train_hidden_size 8".split()
    point = {"hidden_size": 8, "learning_rate": 2e-3, "seed": 0}
    assert read_settings(make_parser().parse_args(suite)).points() == [point]  # one value each is a sweep as well
    given = ["mix.attention=performer", "mix.attention.num_features=32", "mix.hidden_size=64"]
    (entry,) = read_entries("mix=xformer", given)
    assert entry.components == {"attention": {"type": "performer", "num_features": 32}}
    assert entry.fields == {"hidden_size": 64}
    (entry,) = read_entries("gpt2", ['gpt2.per_layer_config={"1": {"attention": "longformer"}}'])
    entry = Entry(**json.loads(json.dumps(entry.to_dict())))  # as a process that measures is given it
    found = make_config(entry, "decoder", 8), make_config(dense_twin(entry, "decoder", 8), "decoder", 8)
    assert [layer.attention.type for layer in found[0].layer_configs()] == ["dense", "longformer", "dense", "dense"]
    assert {layer.attention.type for layer in found[1].layer_configs()} == {"dense"}
    assert list(attention_maps(entry.config_class, entry.fields)) == ["decoder", "decoder, layer 1"]
    assert [entry.label for entry in read_entries("bert,bert", [])] == ["bert"]  # named twice is once


@pytest.mark.slow
def test_the_suite_for_recall(tmp_path, forked):
    """Every width with every rate and seed, continued where it was left, and the best rate of each width shown."""
    command = ["benchmark", "--suite", "recall", "--variants", "linear_transformer", "--output_dir", str(tmp_path)]
    command += (
        "--steps 2 --train_length 16 --train_layers 1 --train_hidden_size 8,16 --learning_rate 1e-3,1e-2".split()
    )
    assert main([*command, "--seed", "0"]) == 0
    assert main([*command, "--seed", "0,1", "--resume"]) == 0
    stored = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(stored) == len(forked) == 2 * 2 * 2 * 2  # dense attention as well
    assert {row["at"] for row in stored} == {"recall"} and {row["status"] for row in stored} == {"ok"}
    by_width = {
        row["point"]["hidden_size"]: row["state size"] for row in stored if row["label"] == "linear_transformer"
    }
    assert by_width == {8: 2 * (4 * 4 + 4), 16: 2 * (8 * 8 + 8)}  # of each of 2 heads: S and z
    assert {row["state size"] for row in stored if row["label"].startswith("dense")} == {2 * 16 * 8, 2 * 16 * 16}
    best = best_of_sweep(stored)
    assert [
        (row["label"], row["hidden size"], row["runs"]) for row in best if row["label"] == "linear_transformer"
    ] == [
        ("linear_transformer", 8, 2),
        ("linear_transformer", 16, 2),
    ]
    text = (tmp_path / "results.md").read_text()
    assert (
        "2 layers" not in text and "1 layers, 8/16 wide" in text and "| recall | linear_transformer | 8 | 40 |" in text
    )
    assert (tmp_path / "state.svg").exists() or not can_plot()


def test_a_sweep_shows_the_rate_with_the_highest_mean():
    def row(rate, accuracy, status="ok"):
        point = {"hidden_size": 8, "learning_rate": rate, "seed": 0}
        about = {"at": "recall", "label": "a", "shape": "decoder", "status": status, "state size": 5}
        return {**about, "point": point, "accuracy": accuracy, "chance accuracy": 0.1}

    rows = [row(0.1, 0.9), row(0.1, 0.1), row(0.2, 0.6), row(0.2, 0.7), row(0.3, 1.0, "failed")]
    (found,) = best_of_sweep(rows)
    assert found["learning rate"] == 0.2 and found["accuracy"] == pytest.approx(0.65) and found["runs"] == 2
    assert (found["lowest"], found["highest"], found["state size"]) == (0.6, 0.7, 5)
