"""Every example of the README runs: the Python blocks in order in one session, the commands with few steps."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_xformers.cli import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_python_examples(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) >= 6
    script = tmp_path / "readme.py"
    script.write_text("\n\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "did you mean 'theta'" in done.stdout.lower()


def console_lines() -> list[str]:
    joined = TEXT.replace("\\\n", " ")
    blocks = re.findall(r"```console\n(.*?)```", joined, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def commands() -> list[str]:
    return [line for line in console_lines() if line.startswith("hf-xformers")]


def launched() -> list[list[str]]:
    """The words of the `accelerate launch` lines, without variables in front."""
    lines = [shlex.split(line) for line in console_lines() if "accelerate launch" in line]
    return [words[words.index("accelerate") + 2 :] for words in lines]


def test_every_console_line_is_tried():
    """Here, or in the tests of what it starts: the demo in test_scripts.py; the installation and the tests by running
    them."""
    others = [line for line in console_lines() if line not in commands() and "accelerate launch" not in line]
    assert [line.split("#")[0].strip() for line in others] == [
        "bash scripts/demo.sh",
        "bash scripts/test.sh",
        "pip install -e .",
    ]


@pytest.mark.parametrize("words", launched(), ids=lambda words: Path(words[1]).stem)
def test_launch_lines(words):
    """The launcher reads its options and file, and `pretrain` knows what comes behind; cli/test_launch.py starts two
    processes."""
    from accelerate.commands.launch import launch_command_parser

    from hf_xformers.cli.pretrain import make_parser

    launcher = launch_command_parser().parse_args(words)
    assert (ROOT / launcher.config_file).is_file() and launcher.module
    assert launcher.training_script == "hf_xformers.cli" and launcher.training_script_args[0] == "pretrain"
    options = launcher.training_script_args[1:]
    known = make_parser({"variant": options[options.index("--variant") + 1]})._option_string_actions
    assert all(word in known for word in options if word.startswith("--"))


def write_rows(folder: Path) -> None:
    """A few rows in the files that the examples name."""
    texts = [f"{word} day number {index}" for index, word in enumerate(["good", "bad"] * 8)]
    rows = [f"{text},{index % 2}" for index, text in enumerate(texts)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    for split in ("train", "dev"):
        words = "".join(f"{word}\t{'B-N' if word.isdigit() else 'O'}\n" for word in texts[0].split())
        (folder / f"{split}.conll").write_text(f"{words}\n{words}")
        for language in ("en", "de"):
            (folder / f"{split}.{language}").write_text("\n".join(texts[:4]) + "\n")


def write_llama(folder: Path) -> None:
    """A tiny Llama where the examples have one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    """In this process, but for one: seconds of imports for each would show nothing more. Paths are as in the README,
    from the folder in which the commands follow each other; the text is a twelfth of the standard library's."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    corpus = importlib.import_module("hf_xformers.data.stdlib_corpus")  # the package has a function of this name
    documents = corpus.stdlib_documents()
    monkeypatch.setattr(corpus, "stdlib_documents", lambda: documents[::12])
    lines = commands()
    assert len(lines) == 11 and sum("pretrain" in line for line in lines) == 2
    write_rows(tmp_path)
    write_llama(tmp_path)
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        if arguments[0] in ("pretrain", "uptrain"):  # as written, but for the length of the run
            arguments[arguments.index("--max_steps") + 1] = "2"
            arguments += ["--use_cpu", "--eval_strategy", "no"]
        if arguments[0] == "linearize":
            arguments += ["--use_cpu", "--eval_strategy", "no"]
        if arguments[0] == "finetune":
            arguments += ["--num_train_epochs", "1", "--use_cpu"]
        if arguments[0] == "pretrain":
            arguments += ["--hidden_size", "32", "--num_hidden_layers", "1"]
        if "reviews.csv" in arguments:
            command = [sys.executable, "-m", "hf_xformers.cli", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
            assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        else:
            assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err[-3000:]}"


def test_scripts_exist():
    for name in re.findall(r"bash (scripts/\w+\.sh)", TEXT):
        assert (ROOT / name).exists()
