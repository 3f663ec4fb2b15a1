# SPDX-License-Identifier: Apache-2.0
"""Trained models in use: the three projections of attention as one, layers compiled one by one, and vectors of parts
of a text.

What transformers brings works by itself: `torch.compile`, caches of several types, assistants, and continuous batching
(`model.generate_batch`). Names are imported when they are first used.
"""

from __future__ import annotations

from ..core.lazy import lazily

_NAMES = {
    "compile_layers": "compiled_layers",
    "fuse_projections": "fused_projections",
    "late_chunks": "late_chunking",
    "pool_spans": "late_chunking",
    "split_projections": "fused_projections",
}

__all__ = list(_NAMES)
__getattr__ = lazily(__name__, _NAMES)
