"""What the headers of scripts and benchmarks show: every form of the demo at a few steps, every example's options."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.variants import config_class
from tests.helpers import tiny_fields

ROOT = Path(__file__).resolve().parent.parent
DEMO_HEADER = [line for line in (ROOT / "scripts" / "demo.sh").read_text().splitlines() if line.startswith("#   ")]
SMALL = {"STEPS": "2", "LENGTH": "48", "BATCH": "2", "COST_LENGTH": "64"}


def load(path: Path):
    """A script as a module, found by the name that its processes import it under."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def search_path(monkeypatch):
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    modules = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(modules):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(
            (str(ROOT / "scripts"), str(ROOT / "benchmarks"))
        ):
            del sys.modules[name]


# ------------------------------------------------------------------------------------------------ demo


def demo_forms() -> list[tuple[str, dict[str, str]]]:
    """(which demo, environment) of every form in the header of demo.sh."""
    forms = []
    for line in DEMO_HEADER:
        before, _, after = line.removeprefix("#   ").partition("scripts/demo.sh")
        environment = dict(word.split("=") for word in before.split())
        which = (after.split() or ["mlm"])[0].strip("[]")
        forms += [(name, environment) for name in which.split("|")]
    return forms


@pytest.fixture
def short_corpus(monkeypatch):
    """A tenth of the text, for speed."""
    module = importlib.import_module("hf_xformers.data.stdlib_corpus")  # the package has a function of this name
    documents = module.stdlib_documents()
    monkeypatch.setattr(module, "stdlib_documents", lambda: documents[::12])


@pytest.mark.parametrize("which, environment", demo_forms())
def test_demo(which, environment, search_path, short_corpus, tmp_path, monkeypatch, capsys):
    for name, value in {**SMALL, **environment, "STEPS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    demo = load(ROOT / "scripts" / "demo.py")
    # What takes processes of their own is measured once: one form, and one attention of the two.
    left, measured = ["once"] if which == "mlm" and not environment else [], demo.memory_in_fresh_process
    monkeypatch.setattr(
        demo,
        "memory_in_fresh_process",
        lambda *args, **options: measured(*args, **options) if left and left.pop() else 2**20,
    )
    assert demo.main(["train", which]) == 0
    assert demo.main(["show", which]) == 0
    printed = capsys.readouterr().out
    assert f"$ hf-xformers pretrain --variant {environment.get('VARIANT', demo.DEMOS[which].variant)}" in printed
    assert "token frequencies" in printed and "times as often as always guessing" in printed
    assert len(demo.PROMPTS["mlm"]) == len(demo.PROMPTS["span"]) == 8 and demo.one_line(printed).count("Return") >= 1
    config = json.loads((tmp_path / "runs" / f"demo-{which}" / "config.json").read_text())
    dense = config["attention"]["type"] == "dense"
    assert ("a training step on one row of 64 tokens" in printed) is not dense
    shown = printed[printed.index("A new process") :]
    assert max(map(len, shown.splitlines())) <= 80
    assert "[PAD]" not in shown and "<extra_id_" not in shown


def test_demo_command_keeps_to_other_models_as_they_are(search_path, monkeypatch):
    demo = load(ROOT / "scripts" / "demo.py")
    tuned = demo.command("mlm", Path("runs"))
    assert {"--residual", "--num_hidden_layers", "--learning_rate", "1000"} <= set(tuned)
    monkeypatch.setenv("SIZE", "small")
    assert {"--num_hidden_layers", "--learning_rate"}.isdisjoint(demo.command("mlm", Path("runs")))
    monkeypatch.setenv("VARIANT", "bert")
    assert "--residual" not in demo.command("mlm", Path("runs"))


@pytest.mark.parametrize(("variant", "compared"), [("funnel_transformer", False), ("gpt3_alternating", True)])
def test_demo_costs_of_other_variants(variant, compared, search_path, tmp_path, monkeypatch, capsys):
    """Parts that ask for the variant's own attention are named, and layers that differ all become dense."""
    monkeypatch.setenv("COST_LENGTH", "32")
    demo = load(ROOT / "scripts" / "demo.py")
    monkeypatch.setattr(demo, "memory_in_fresh_process", lambda *args, **options: 2**20)
    cls = config_class(variant)
    config = cls(**tiny_fields(cls, "decoder" if compared else "encoder"), is_decoder=compared)
    config.save_pretrained(tmp_path)
    demo.print_costs("clm" if compared else "mlm", tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("a training step on one row of 32 tokens" in printed) is compared
    assert ("A training step is not compared with dense attention: funnel" in printed) is not compared
    fields = {"num_hidden_layers": 2, "per_layer_config": {1: {"attention": "longformer"}}}
    dense = XFormerConfig(**demo.with_dense_attention(fields))
    assert {layer.attention.type for layer in dense.layer_configs()} == {"dense"}


def test_demo_shell_script(tmp_path):
    """What the shell adds: the set-up, then both halves with the environment's Python; an unknown demo is refused."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.sh", tmp_path / "scripts" / "demo.sh")
    shutil.copy(ROOT / "scripts" / "demo.py", tmp_path / "scripts" / "demo.py")
    (tmp_path / "scripts" / "setup.sh").write_text("echo set up\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\necho "$@"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "HF_XFORMERS_VENV"}
    for given, which in (([], "mlm"), (["t5"], "t5")):
        done = subprocess.run(
            ["bash", str(tmp_path / "scripts" / "demo.sh"), *given], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "set up",
            f"scripts/demo.py train {which}",
            f"scripts/demo.py show {which}",
        ]


# ------------------------------------------------------------------------------------------------ examples


class Parsed(Exception):
    """The command line was understood; what would follow takes minutes."""


def examples(path: Path) -> list[list[str]]:
    """The arguments of every `python <path> ...` in a script's docstring, with what is optional."""
    found = []
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    name = f"{path.parent.name}/{path.name}"
    for line in docstring.splitlines():
        match = re.search(rf"python {re.escape(name)}(.*)", line)
        if match:
            text = re.split(r"\s{2,}|#", match[1])[0].strip()
            text = re.sub(r"[\[\]]", "", text).replace("...", "").replace(" DIR", " .").replace(" N", " 1")
            found.append(shlex.split(text))
    return found


SCRIPTS = [path for folder in ("scripts", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))]
SHOWN = [(path, arguments) for path in SCRIPTS for arguments in examples(path)]


def test_there_are_examples():
    assert len(SHOWN) >= 16
    assert {"conformance", "demo", "decoding", "pretraining"} <= {path.stem for path, _ in SHOWN}


@pytest.mark.parametrize("path, arguments", SHOWN, ids=lambda value: getattr(value, "stem", " "))
def test_examples_are_understood(path, arguments, search_path, monkeypatch):
    """Run up to where the measuring would begin."""
    name = "parse_known_args" if path.stem == "affected" else "parse_args"  # its further words go to pytest
    parse = getattr(argparse.ArgumentParser, name)

    def parse_and_stop(self, *given):
        parse(self, *given)
        raise Parsed

    module = load(path)
    monkeypatch.setattr(argparse.ArgumentParser, name, parse_and_stop)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(Parsed):
        (module.benchmark if path.stem == "finetuning" else module.main)()


def test_a_benchmark_runs(search_path, monkeypatch, capsys):
    """All the way: the one that is small enough and stores nothing."""
    module = load(ROOT / "benchmarks" / "padding_removal.py")
    sizes = ["--length", "32", "--batch", "2", "--layers", "1", "--hidden-size", "64", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["padding_removal", *sizes])
    module.main()
    assert "bert" in capsys.readouterr().out


def test_the_gpu_script_runs_on_a_processor(tmp_path):
    """At tiny sizes, the same code: each part has rows, and none of them is an error."""
    environment = {**os.environ, "HF_XFORMERS_VENV": sys.prefix}
    command = ["bash", str(ROOT / "scripts" / "gpu.sh"), "--minutes", "0.4", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "ended with" not in done.stdout, done.stdout + done.stderr
    for part in ("families", "layers", "models"):
        rows = json.loads((tmp_path / f"gpu_{part}.json").read_text())["rows"]
        assert rows and not [row for row in rows if any("error" in key for key in row)]


WIKITEXT = """
 = First <unk> =

 The sea is 1 @,@ 000 m deep . What lives there ? Many things do .

 = = Food = =

 = 3 k <unk>
 It eats what it finds on the ground .

 = Second =

 The lobster lives in the sea .
"""


def test_long_encoder(search_path, monkeypatch, tmp_path):
    """Sentences of articles; a model that is its teacher has nothing to learn from one piece; words stay as they
    are."""
    from tests.documents import write_minilm

    script = load(ROOT / "scripts" / "long_encoder.py")
    text, source, output = tmp_path / "text.txt", tmp_path / "models" / "minilm", tmp_path / "long"
    text.write_text(WIKITEXT)
    write_minilm(tmp_path)
    first = ["First", "The sea is 1,000 m deep .", "What lives there ?", "Many things do .", "Food"]
    first += ["3 k", "It eats what it finds on the ground ."]
    assert script.articles(text) == [first, ["Second", "The lobster lives in the sea ."]]

    teacher = script.SentenceTransformer(str(source), device="cpu").eval()
    follow = script.FollowPieces(teacher, teacher, context=0.5)
    batch = teacher.tokenizer(["the lobster lives in the sea", "it eats"], padding=True, return_tensors="pt")
    assert follow([dict(batch)]).item() < 1e-6
    monkeypatch.setattr(script, "PIECE", (2, 2))  # several pieces, which the states of a whole text do not give
    assert follow([dict(batch)]).item() > 1e-4
    vectors = torch.tensor([[0.0], [1.0], [5.0]])
    assert script.neighbors(vectors).tolist() == [[1.0], [2.5], [1.0]]
    assert script.neighbors(vectors[:1]).tolist() == [[0.0]]

    options = ["--model", source, "--teacher", source, "--text", text, "--output_dir", output, "--steps", 2]
    monkeypatch.setattr(sys, "argv", ["long_encoder", *map(str, options)])
    script.main()
    assert json.loads((output / script.RECORD).read_text())["steps"] == 2
    before, after = teacher.state_dict(), script.SentenceTransformer(str(output), device="cpu").state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("embeddings" in name for name in moved)
