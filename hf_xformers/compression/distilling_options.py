# SPDX-License-Identifier: Apache-2.0
"""Options of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Distilling:
    """Whose knowledge goes into which student."""

    _argument_group_name = "distillation"

    teacher: str = field(
        metadata={"help": "Trained model: a folder or a Hub id, of this package or one that converts."}
    )
    copy_layers: str = field(
        default="alternate",
        metadata={"help": "Layers of the teacher that its student starts from: first, last, alternate, or 0,2,5."},
    )
    size: str | None = field(
        default=None, metadata={"help": "tiny, small, base or large, of a student of another variant."}
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "Numbers that the teacher computes with."}
    )
    store_teacher: bool = field(
        default=False,
        metadata={"help": "Compute the teacher's outputs once and keep them in --output_dir, of a task."},
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove an earlier distillation in --output_dir."}
    )


@dataclass
class OnText:
    """What a language model learns on."""

    _argument_group_name = "text"

    objective: str | None = field(
        default=None, metadata={"help": "{objectives}; settings as --objective.FIELD VALUE. Default: the teacher's."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: that of the teacher's training."}
    )
