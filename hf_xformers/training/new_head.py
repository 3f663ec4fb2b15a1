# SPDX-License-Identifier: Apache-2.0
"""A head that a saved model does not have, for an objective that needs it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from ..core.saved_files import stored_types, weight_files


def new_head(folder: str | Path, cls: Any, config: Any) -> list[str]:
    """Tensors outside of the base model that the class `cls`, of configuration `config`, has and the saved model
    lacks: they start untrained. Only safetensors are looked into; other files count as whole."""
    files = weight_files(Path(folder).expanduser())
    if not files or any(path.suffix != ".safetensors" for path in files):
        return []
    stored = {name for path in files for name in stored_types(path)}
    with torch.device("meta"):
        skeleton = cls(copy.deepcopy(config))
    known = stored | set(skeleton._tied_weights_keys or {})
    return sorted(
        name
        for name in skeleton.state_dict()
        if not name.startswith(f"{skeleton.base_model_prefix}.") and name not in known
    )
