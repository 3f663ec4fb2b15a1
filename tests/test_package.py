"""The wheel is complete: it installs and works outside the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_xformers.hub.flattening import LICENCE

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("py.typed", "cli/templates/card.md", "hub/variants.toml", "hub/results.toml", "variants/references.bib")

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
    assert sources <= names and {f"hf_xformers/{file}" for file in OTHERS} <= names
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


def test_every_file_says_its_licence():
    """Those of `hf-xformers new` are their authors'."""
    files = [path for path in (ROOT / "hf_xformers").rglob("*.py") if "templates" not in path.parts]
    missing = [path.relative_to(ROOT).as_posix() for path in files if not path.read_text().startswith(LICENCE)]
    assert len(files) > 500 and not missing, f"sed -i '1i {LICENCE.strip()}' {' '.join(missing)}"


def test_it_brings_what_transformers_brings():
    """`pip install hf_xformers`, beside torch; scripts/wheel.py tries it with pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [Requirement(item) for item in project["dependencies"]]
    assert len(needed(own) - needed([Requirement("transformers"), Requirement("torch")])) <= 3


def needed(requirements):
    """Names of distributions, of what these need as well."""
    found, waiting = set(), list(requirements)
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(item) for item in importlib.metadata.requires(name) or []]
    return found


def test_import_is_quick_and_loads_no_torch():
    code = (
        "import sys, time; start = time.process_time(); import hf_xformers; seconds = time.process_time() - start;"
        " print(seconds, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(5)]
    seconds, loaded = zip(*(text.split(maxsplit=1) for text in found))
    assert set(loaded) == {"[]\n"} and min(map(float, seconds)) < 0.15


def _copy(target: Path) -> Path:
    """The files that a build needs; building in the checkout itself would leave its traces there."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / "hf_xformers", target / "hf_xformers", ignore=shutil.ignore_patterns("__pycache__"))
    return target
