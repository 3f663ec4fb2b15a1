"""Every example of the README runs: the Python blocks in order in one session, the commands with few steps."""

from __future__ import annotations

import re
import shlex
import sys
import types

import pytest

from hf_xformers.cli import main
from hf_xformers.conversion import converters
from hf_xformers.finetuning.tasks import TASKS
from hf_xformers.objectives import OBJECTIVES
from hf_xformers.variants import model_types
from tests.documents import (
    ROOT,
    blocks,
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
    monkeypatch.chdir(tmp_path)
    session = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, session.__name__, session)
    printed = []
    for number, text in enumerate(found):
        exec(compile(text, f"README.md, block {number}", "exec"), vars(session))
        printed.append(capsys.readouterr().out)
    [shown] = [text for kind, text in blocks(TEXT) if kind == "text"]
    assert re.sub(r"\de-0[67]", "TINY", printed[0]) == re.sub(r"\de-0[67]", "TINY", shown)
    assert "did you mean 'theta'" in printed[1].lower() and len(found) == 2


CONSOLE = [line for kind, text in blocks(TEXT) if kind == "console" for line in lines(text)]
COMMANDS = [line for line in CONSOLE if line.startswith("hf-xformers")]


def test_every_console_line_is_tried():
    """Here, or in the tests of what it starts: the demo in test_scripts.py; the installation and the tests by running
    them."""
    others = [line for line in CONSOLE if line not in COMMANDS]
    clone = ["git clone https://github.com/hf-xformers/hf_xformers", "cd hf_xformers", 'pip install -e ".[train]"']
    assert others == [*clone, "bash scripts/demo.sh", "bash scripts/test.sh"]


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    """In this process: seconds of imports for each would show nothing more (cli/test_launch.py starts others). Paths
    are as in the README, from the folder in which the commands follow each other."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    write_llama(tmp_path)
    with small_corpus(tmp_path):
        for line in COMMANDS:
            assert main(short(shlex.split(line)[1:])) == 0, f"{line}\n{capsys.readouterr().err[-3000:]}"


def test_every_file_that_it_names_exists():
    names = re.findall(r"bash (scripts/\w+\.sh)", TEXT) + re.findall(r"\]\(((?!http)[^)]+)\)", TEXT)
    assert len(names) > 15 and not [name for name in names if not (ROOT / name.partition("#")[0]).exists()]


def test_tests_that_hold_its_claims_exist():
    """`tests/file.py::test_name` of its table."""
    claims = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert claims and not [
        test for file, test in claims if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]


def test_numbers_are_those_of_the_registries():
    known = {
        "Transformer variants": model_types(),
        "families of transformers": converters(),
        "pretraining objectives": OBJECTIVES,
        "tasks": TASKS,
    }
    for what, entries in known.items():
        assert re.findall(rf"\b(\d+) {what}", TEXT) == [str(len(entries))], what
