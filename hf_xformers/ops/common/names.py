"""Names of the compute engines' operators in `torch.ops`."""

from __future__ import annotations

import zlib


def operator_name(module: str, name: str) -> str:
    """`hf_xformers::name`; for a copy of the code in another module (a self-contained checkpoint) a namespace of its
    own, so that several copies live in one process."""
    package = module.partition(".")[0]
    space = package if package == "hf_xformers" else f"hf_xformers_{zlib.crc32(module.encode()):08x}"
    return f"{space}::{name}"
