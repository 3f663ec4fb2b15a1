"""The site is built strictly: a small one passes, and fails as soon as a link in it is dead. `.ci/run` builds all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs.check_site import problems
from scripts.docs.equations import with_equations
from scripts.docs.navigation import configuration

if importlib.util.find_spec("zensical") is None:
    pytest.skip("the site is built by zensical (the extra `docs`)", allow_module_level=True)

INDEX = """# Start

[Luna](zoo/luna.md), and its [cost](zoo/luna.md#cost).
"""
LUNA = """# Luna

## Cost

$$
O(T l D), \\qquad a_{i*j} < b_{i*j}
$$

::: hf_xformers.families.Section
"""


def build(folder: Path, index: str) -> int:
    pages = folder / "pages"
    (pages / "zoo").mkdir(parents=True, exist_ok=True)
    (pages / "assets").mkdir(exist_ok=True)
    for name in ("site.css", "taxonomy.js"):
        (pages / "assets" / name).write_text("")
    (pages / "index.md").write_text(index)
    (pages / "zoo" / "luna.md").write_text(with_equations(LUNA))
    (folder / "mkdocs.yml").write_text(configuration(["index.md", "zoo/luna.md"]))
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean", "-f", "mkdocs.yml"]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode


def test_a_strict_build(tmp_path):
    pytest.importorskip("latex2mathml", reason="equations need latex2mathml (the extra `docs`)")
    assert build(tmp_path, INDEX) == 0
    site = tmp_path / "site"
    assert problems(site) == []
    text = (site / "zoo" / "luna.html").read_text()
    equation = text.partition('class="equation"')[2].partition("</div></div>")[0]
    assert equation.count("<math") == 2 and "<em>" not in equation and "what its systems change" in text
    assert build(tmp_path, INDEX + "\n[Linformer](zoo/linformer.md)\n") != 0
