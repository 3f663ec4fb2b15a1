"""What README, guides and notebooks import is public: listed by one of the package's public modules."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys

import hf_xformers
from tests.documents import ROOT, blocks


def examples():
    """(where, code) of every Python example."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for kind, text in blocks(path.read_text(encoding="utf-8")):
            if kind == "python":
                yield path.name, text
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield path.name, "".join(line for line in cell["source"] if not line.startswith(("%", "!")))


def test_examples_import_public_names():
    private, seen = [], 0
    for where, text in examples():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_xformers"):
                package = node.module.removeprefix("hf_xformers").removeprefix(".")
                listed = (
                    importlib.import_module(node.module).__all__ if package in ("", *hf_xformers._PACKAGES) else []
                )
                names = [alias.name for alias in node.names]
                seen += len(names)
                private += [f"{where}: {node.module}.{name}" for name in names if name not in listed]
    assert seen > 30 and not private, private


def test_stubs_are_those_of_today():
    done = subprocess.run(
        [sys.executable, "scripts/make_stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"run scripts/make_stubs.py: {done.stdout}{done.stderr[-2000:]}"


def test_sub_packages_are_there_without_an_import_of_their_own():
    """And nothing loads torch before it is used."""
    code = "import hf_xformers, sys; assert 'torch' not in sys.modules and 'XFBertConfig' in hf_xformers.__all__\n"
    code += "for name in hf_xformers._PACKAGES: getattr(hf_xformers, name).__all__"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
