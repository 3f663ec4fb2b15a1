"""The examples of CONTRIBUTING.md are complete: written to files as it says, they are working components."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_xformers

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "attention/distance_decay",
    "attention/gated_mean",
    "heads/learned_scale",
    "finetuning/tasks/grading",
    "conversion/families/seed_oss",
    "variants/distance_decay",
    "position/log_distance",
    "stacks/repeated",
    "objectives/last_tokens",
}


def examples():
    """File, without its ending -> code."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"`hf_xformers/([\w/]+)\.py`:\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    assert {name for name, _ in blocks} == FILES and len(blocks) == len(FILES)
    return dict(blocks)


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """The examples' files, tried in one process (see tests/contributing_examples.py)."""
    folder = tmp_path_factory.mktemp("examples")
    for name, code in examples().items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "tests.contributing_examples", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    "example", ["attention", "stateful_attention", "position", "stack", "objective", "head", "task", "family"]
)
def test_the_example_works(used, example):
    assert f"{example} works" in used.stdout, used.stderr[-4000:]


@pytest.mark.parametrize("name", sorted(FILES))
def test_what_it_imports_is_public(name):
    """Under the same name, in `hf_xformers.extend` or another public module."""
    public = {id(getattr(module, n)) for module in map(_module, hf_xformers._PACKAGES) for n in module.__all__}
    imports = [node for node in ast.parse(examples()[name]).body if isinstance(node, ast.ImportFrom)]
    names = [(node.module, entry.name) for node in imports for entry in node.names]
    own = [pair for pair in names if pair[0].startswith("hf_xformers")]
    assert own and not [pair for pair in own if id(getattr(importlib.import_module(pair[0]), pair[1])) not in public]


def _module(package):
    return importlib.import_module(f"hf_xformers.{package}")


def test_the_guide_stays_readable():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) < 600 and max(map(len, lines)) <= 119
