"""The examples of CONTRIBUTING.md are complete: written to files as it says, they are working components."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "attention/distance_decay",
    "variants/distance_decay",
    "position/log_distance",
    "stacks/repeated",
    "objectives/last_tokens",
}


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """The examples' files, tried in one process (see tests/contributing_examples.py)."""
    folder = tmp_path_factory.mktemp("examples")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"`hf_xformers/(\w+/\w+)\.py`:\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    assert {name for name, _ in blocks} == FILES and len(blocks) == len(FILES)
    for name, code in blocks:
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "tests.contributing_examples", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("example", ["attention", "position", "stack", "objective"])
def test_the_example_works(used, example):
    assert f"{example} works" in used.stdout, used.stderr[-4000:]


def test_the_guide_stays_readable():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) < 370 and max(map(len, lines)) <= 119
