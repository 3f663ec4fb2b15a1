"""The wheel is complete: it installs and works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USE = """
import hf_xformers, sys
from transformers import AutoConfig, AutoModelForMaskedLM
assert hf_xformers.__file__.startswith(sys.argv[1]), hf_xformers.__file__
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
AutoModelForMaskedLM.from_config(hf_xformers.XFormerConfig(**sizes))
for name in ("xf_bert", "xformer"):
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(name, **sizes))
import hf_xformers.cli, hf_xformers.conversion, hf_xformers.data, hf_xformers.hub, hf_xformers.objectives
print("works")
"""


def test_wheel_works_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(_copy(tmp_path / "source"))]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hf_xformers-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_xformers").rglob("*.py")}
    assert sources <= names and "hf_xformers/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(site)], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0 and "works" in done.stdout, done.stderr[-3000:]


def _copy(target: Path) -> Path:
    """The files that a build needs; building in the checkout itself would leave its traces there."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / "hf_xformers", target / "hf_xformers", ignore=shutil.ignore_patterns("__pycache__"))
    return target
