"""Every example of the README runs: the Python blocks in order in one session, the commands with few steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_xformers.cli import main
from tests.documents import (
    ROOT,
    blocks,
    check_launch,
    environment,
    launched,
    lines,
    short,
    small_corpus,
    write_llama,
    write_rows,
)

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples(tmp_path):
    found = [text for kind, text in blocks(TEXT) if kind == "python"]
    assert len(found) >= 6
    script = tmp_path / "readme.py"
    script.write_text("\n\n".join(found), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "did you mean 'theta'" in done.stdout.lower()


CONSOLE = [line for kind, text in blocks(TEXT) if kind == "console" for line in lines(text)]
COMMANDS = [line for line in CONSOLE if line.startswith("hf-xformers")]
LAUNCHED = [words for words in map(launched, CONSOLE) if words is not None]


def test_every_console_line_is_tried():
    """Here, or in the tests of what it starts: the demo in test_scripts.py; the installation and the tests by running
    them."""
    others = [line for line in CONSOLE if line not in COMMANDS and launched(line) is None]
    assert others == ["bash scripts/demo.sh", "bash scripts/test.sh", "pip install -e ."]


@pytest.mark.parametrize("words", LAUNCHED, ids=lambda words: Path(words[1]).stem)
def test_launch_lines(words):
    check_launch(words)


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    """In this process, but for one: seconds of imports for each would show nothing more. Paths are as in the README,
    from the folder in which the commands follow each other."""
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 11 and sum("pretrain" in line for line in COMMANDS) == 2
    write_rows(tmp_path)
    write_llama(tmp_path)
    with small_corpus(tmp_path):
        for line in COMMANDS:
            arguments = short(shlex.split(line)[1:])
            if "reviews.csv" in arguments:
                command = [sys.executable, "-m", "hf_xformers.cli", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, env=environment())
                assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
            else:
                assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err[-3000:]}"


def test_scripts_exist():
    for name in re.findall(r"bash (scripts/\w+\.sh)", TEXT):
        assert (ROOT / name).exists()
