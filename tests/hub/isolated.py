"""Python processes that have transformers and torch, but not this package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The package may be installed where the tests run, so that leaving it off the path would not hide it.
WITHOUT_PACKAGE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_xformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
try:
    import hf_xformers
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("hf_xformers can be imported")
"""
_DROPPED = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT")


def environment(home: Path, **more: str) -> dict[str, str]:
    """The variables of a process whose Hugging Face caches, token and modules lie under `home`."""
    kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
    own = {
        "HF_HOME": str(home / "hf"),
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return {**kept, "HF_HUB_OFFLINE": "1", **own, **more}


def run_without_package(code: str, *arguments: str, home: Path, timeout: float = 240, **more: str) -> str:
    """Runs a script in which `import hf_xformers` fails; returns what it prints. A failure is an AssertionError."""
    script = home / "script.py"
    home.mkdir(parents=True, exist_ok=True)
    script.write_text(WITHOUT_PACKAGE + textwrap.dedent(code), encoding="utf-8")
    return run([sys.executable, "-I", str(script), *arguments], home=home, timeout=timeout, **more)


def run(command: list[str], *, home: Path, timeout: float = 240, expect: int = 0, **more: str) -> str:
    """Runs a command in `home`; returns its output. Another exit code than `expect` is an AssertionError."""
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=home, env=environment(home, **more), timeout=timeout
    )
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + (done.stderr if expect else "")
