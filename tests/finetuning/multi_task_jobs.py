"""What the processes of test_multi_task.py do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import hf_xformers.cli


def several_tasks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A run of several tasks, whose command line stands in `line.json` beside the folder of the job."""
    line = json.loads((Path(folder).parent / "line.json").read_text())
    place = Path(folder) / str(world)
    more = ["--output_dir", str(place), "--per_device_train_batch_size", str(8 // world)]
    more += ["--ddp_backend", "gloo"] if world > 1 else []
    assert hf_xformers.cli.main([*line, *more]) == 0
    summary = json.loads((place / "training_summary.json").read_text()) if rank == 0 else {}
    state = {name: load_file(place / name / "model.safetensors") for name in summary.get("tasks", ())}
    return {"summary": summary, "state": state}
