# SPDX-License-Identifier: Apache-2.0
"""Size presets: geometry, vocabulary, row length and training settings that go together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..configuration_xformer import XFormerConfig


@dataclass(frozen=True)
class Size:
    """One size.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads: geometry; an encoder-decoder divides the layers among its
            towers.
        vocab_size: ids of a tokenizer that is trained for it.
        block_size: tokens of a row.
        learning_rate: peak.
        batch_size: rows per device.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    block_size: int
    learning_rate: float
    batch_size: int


# With the feed-forward ratio 4: about 1.5, 28, 110 and 340 million parameters.
SIZES = {
    "tiny": Size(128, 4, 4, 4096, 128, 1e-3, 16),
    "small": Size(512, 6, 8, 16384, 256, 5e-4, 16),
    "base": Size(768, 12, 12, 32768, 512, 2e-4, 16),
    "large": Size(1024, 24, 16, 32768, 512, 1e-4, 8),
}


def size_named(name: str) -> Size:
    """The size called `name`. Raises ValueError for an unknown one."""
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}: choose one of {', '.join(SIZES)}")
    return SIZES[name]


def nearest_size(hidden_size: int | None) -> str:
    """The largest size that is not wider than a model, for training settings that suit it."""
    fitting = [name for name, size in SIZES.items() if hidden_size is not None and size.hidden_size <= hidden_size]
    return (fitting or list(SIZES))[-1 if fitting else 0]


def size_fields(config_class: type[XFormerConfig], name: str, *, two_towers: bool) -> dict[str, Any]:
    """Configuration fields of size `name` for a variant.

    The variant keeps its own ratio of feed-forward to hidden width, and everything that is no matter of size. A
    variant whose structure ties fields together (stages, say) may declare `sizes` with the fields that differ from the
    general preset.
    """
    size = size_named(name)
    default: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config_class)}
    ratio = default["intermediate_size"] / default["hidden_size"]
    layers = size.num_hidden_layers
    fields = {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": max(1, layers // 2) if two_towers else layers,
        "num_attention_heads": size.num_attention_heads,
        "intermediate_size": max(8, round(size.hidden_size * ratio / 8) * 8),
    }
    return {**fields, **config_class.sizes.get(name, {})}


def training_defaults(name: str) -> dict[str, Any]:
    """`TrainingArguments` that suit size `name` where the library's own defaults are meant for fine-tuning."""
    import torch

    size = size_named(name)
    return {
        "learning_rate": size.learning_rate,
        "per_device_train_batch_size": size.batch_size,
        "per_device_eval_batch_size": size.batch_size,  # what training has the memory for
        "weight_decay": 0.01,
        "adam_beta2": 0.98,
        "warmup_steps": 0.06,  # below 1: the share of all steps
        "logging_steps": 50,
        "eval_strategy": "steps",
        "eval_steps": 500,
        "save_steps": 500,
        "save_total_limit": 2,
        "report_to": "none",
        "remove_unused_columns": False,  # rows hold what the collator needs and nothing else
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
