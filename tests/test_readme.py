"""Every example of the README runs: the Python blocks in order in one session, the commands with few steps."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path

import pytest

from hf_xformers.cli import main
from tests.documents import (
    ROOT,
    blocks,
    check_launch,
    launched,
    lines,
    short,
    small_corpus,
    write_llama,
    write_rows,
)

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples(tmp_path, monkeypatch, capsys):
    """In this process, which has imported what they import; test_package.py begins in a new one."""
    found = [text for kind, text in blocks(TEXT) if kind == "python"]
    assert len(found) >= 6
    monkeypatch.chdir(tmp_path)
    session = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, session.__name__, session)
    with small_corpus(tmp_path):
        for number, text in enumerate(found):
            exec(compile(text, f"README.md, block {number}", "exec"), vars(session))
    assert "did you mean 'theta'" in capsys.readouterr().out.lower()


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
    """In this process: seconds of imports for each would show nothing more (cli/test_launch.py starts others). Paths
    are as in the README, from the folder in which the commands follow each other."""
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 11 and sum("pretrain" in line for line in COMMANDS) == 2
    write_rows(tmp_path)
    write_llama(tmp_path)
    with small_corpus(tmp_path):
        for line in COMMANDS:
            assert main(short(shlex.split(line)[1:])) == 0, f"{line}\n{capsys.readouterr().err[-3000:]}"


def test_scripts_exist():
    for name in re.findall(r"bash (scripts/\w+\.sh)", TEXT):
        assert (ROOT / name).exists()
