"""Obtains transformers' own common tests at run time and lays them out as an importable package.

They are not in the wheel, only in the source archive, and nothing of them is kept in this repository: the archive of
the installed version goes to a cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "transformers_common_tests"  # not "tests", which would hide the folder of that name in this repository
WANTED = ("test_modeling_common.py", "test_configuration_common.py", "test_training_mixin.py")

# What the archive leaves out, although the files above import it, and the module here that stands in for it.
STAND_INS = {
    "generation/test_utils.py": "from generation_checks import GenerationTesterMixin\n",
    "exporters/test_export.py": "from export_checks import ExportTesterMixin\n",
    "utils/test_configuration_utils.py": "from model_tester import CONFIG_COMMON_KWARGS as config_common_kwargs\n",
}


class Unavailable(Exception):
    """The source archive can be neither found in the cache nor downloaded."""


def cache_folder() -> Path:
    """`conformance` inside `$HF_XFORMERS_CACHE`, or inside `hf_xformers` in the user's folder for caches."""
    chosen = os.environ.get("HF_XFORMERS_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "conformance"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hf_xformers" / "conformance"


def source_archive(version: str) -> Path:
    """Path of transformers' source archive of this version, downloaded with pip if the cache lacks it.

    Raises:
        Unavailable: pip could not download it; the message has pip's last line.
    """
    name = f"transformers-{version}.tar.gz"
    archive = cache_folder() / name
    if archive.is_file():
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    # pip asks a source archive for its metadata; with --no-build-isolation the installed setuptools will do.
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "--no-binary", ":all:", "--dest", folder,
             f"transformers=={version}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode != 0 or not (Path(folder) / name).is_file():
            lines = done.stdout.strip().splitlines() or [f"pip ended with {done.returncode}"]
            raise Unavailable(f"the source archive of transformers {version} could not be downloaded: {lines[-1]}")
        os.replace(Path(folder) / name, archive)  # whole or not at all, also when two runs start together
    return archive


def lay_out(root: Path, version: str) -> None:
    """Writes the package of common tests under `root`, a folder that goes on the module search path.

    Raises:
        Unavailable: there is no archive of this version, or it lacks a file that the runner needs.
    """
    package = root / PACKAGE
    for folder in (package, *(package / Path(name).parent for name in STAND_INS)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    with tarfile.open(source_archive(version)) as archive:
        for name in WANTED:
            try:
                member = archive.extractfile(f"transformers-{version}/tests/{name}")
            except KeyError:
                member = None
            if member is None:
                raise Unavailable(f"the source archive of transformers {version} has no tests/{name}")
            (package / name).write_bytes(member.read())
    for name, text in STAND_INS.items():
        (package / name).write_text(text)
