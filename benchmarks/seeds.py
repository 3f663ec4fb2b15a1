"""Runs of the command line with several seeds, and the row of a table that they give together."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_xformers.cli import main as command


def trained(words: Sequence[str], folder: Path) -> tuple[dict[str, Any], float]:
    """Summary and processor seconds of `hf-xformers` with these words, which writes to the folder."""
    start = time.process_time()
    if command([*words, "--output_dir", str(folder)]):
        raise SystemExit(f"this did not run: hf-xformers {' '.join(words)}")
    return json.loads((folder / "training_summary.json").read_text()), time.process_time() - start


def together(figures: Sequence[float], seconds: Sequence[float], **known: Any) -> dict[str, Any]:
    """The mean of a figure over seeds and its spread, largest less smallest, and the mean of processor seconds."""
    found = {"seeds": len(figures), "held out": statistics.mean(figures), "spread": max(figures) - min(figures)}
    return {**known, **found, "processor seconds": statistics.mean(seconds)}
