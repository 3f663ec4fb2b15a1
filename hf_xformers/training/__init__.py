# SPDX-License-Identifier: Apache-2.0
"""Training: Trainer with exact metrics and resumption, size presets, and pretraining from text to a saved model.

Names are imported when they are first used: `datasets` and transformers' Trainer are slow to load.
"""

from __future__ import annotations

from ..core.lazy import lazily

_NAMES = {
    "SIZES": "presets",
    "training_defaults": "presets",
    "build_config": "building",
    "build_model": "building",
    "XFormerTrainer": "trainer",
    "StreamSampler": "segments",
    "SegmentCarrier": "segments",
    "EpochCallback": "callbacks",
    "ExactSaves": "callbacks",
    "checkpoint_to_resume": "checkpoints",
    "newest_complete": "checkpoints",
    "token_statistics": "evaluation",
    "summarise": "evaluation",
    "TextData": "text",
    "ModelChoice": "preparation",
    "Preparation": "preparation",
    "pretrain": "pretraining",
    "Distillation": "distillation",
    "DistillationTrainer": "distillation",
    "Uptraining": "uptraining",
    "uptrain": "uptraining",
    "AttentionTransferTrainer": "attention_transfer",
    "Linearizing": "linearizing",
    "linearize": "linearizing",
    "Searching": "architecture_search",
    "search": "architecture_search",
}

__all__ = list(_NAMES)
__getattr__ = lazily(__name__, _NAMES)
