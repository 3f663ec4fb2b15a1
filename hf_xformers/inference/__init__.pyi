# Written by scripts/make_stubs.py.
from .compiled_layers import compile_layers as compile_layers
from .fused_projections import fuse_projections as fuse_projections
from .fused_projections import split_projections as split_projections
from .late_chunking import late_chunks as late_chunks
from .late_chunking import pool_spans as pool_spans

__all__ = [
    "compile_layers",
    "fuse_projections",
    "late_chunks",
    "pool_spans",
    "split_projections",
]
