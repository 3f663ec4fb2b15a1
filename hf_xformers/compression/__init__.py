# SPDX-License-Identifier: Apache-2.0
"""Compression: a trained model made smaller or faster, and the account of what that cost.

Every command of this package reads a model from a folder and writes one into another, so that they compose, and leaves
the table of [`report`](report.py) next to the model.

Names are imported when they are first used: `datasets`, `peft` and transformers' Trainer are slow to load.
"""

from __future__ import annotations

from ..core.lazy import lazily

_NAMES = {
    "Measuring": "report",
    "Row": "report",
    "compare": "report",
    "measure": "report",
    "read_steps": "report",
    "table": "report",
    "write_table": "report",
    "METHODS": "methods",
    "build_method": "methods",
    "Distiller": "distillation",
    "Distilling": "distilling_options",
    "distill": "distillation",
    "StudentChoice": "students",
    "build_student": "students",
    "Pruning": "choice",
    "prune": "pruning",
    "prune_heads": "head_pruning",
    "prune_layers": "layers",
    "Quantizer": "quantization",
    "Quantizing": "quantization",
    "quantize": "quantization",
}

__all__ = list(_NAMES)
__getattr__ = lazily(__name__, _NAMES)
