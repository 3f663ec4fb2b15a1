# SPDX-License-Identifier: Apache-2.0
"""Names of the compute engines' operators in `torch.ops`, and what is said of all of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch

# They write to nothing given, and no graph of launches may hold them: they read lengths and seed dropout.
OPTIONS: dict[str, Any] = {
    "mutates_args": (),
    "tags": tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)),
}


def operator_name(module: str, name: str) -> str:
    """`hf_xformers::name`; for a copy of the code in another module (a self-contained checkpoint) a namespace of its
    own, so that several copies live in one process."""
    package = module.partition(".")[0]
    space = package if package == "hf_xformers" else f"hf_xformers_{zlib.crc32(module.encode()):08x}"
    return f"{space}::{name}"
