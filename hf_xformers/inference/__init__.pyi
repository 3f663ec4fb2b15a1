# Written by scripts/make_stubs.py.
from .batch_plan import BatchCosts as BatchCosts
from .batch_plan import measure_batch_costs as measure_batch_costs
from .batch_plan import plan_batches as plan_batches
from .batch_plan import run_in_batches as run_in_batches
from .compiled_layers import compile_layers as compile_layers
from .fused_projections import fuse_projections as fuse_projections
from .fused_projections import split_projections as split_projections
from .late_chunking import late_chunks as late_chunks
from .late_chunking import pool_spans as pool_spans

__all__ = [
    "BatchCosts",
    "compile_layers",
    "fuse_projections",
    "late_chunks",
    "measure_batch_costs",
    "plan_batches",
    "pool_spans",
    "run_in_batches",
    "split_projections",
]
