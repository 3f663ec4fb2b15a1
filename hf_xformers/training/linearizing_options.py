# SPDX-License-Identifier: Apache-2.0
"""What a linearization is asked for: the model, its layers, and how long each stage trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..conversion.linearization import TITLES
from ..core.given_options import refuse_alone
from .distillation import Distillation

STAGES = tuple(TITLES)
# Options of one stage alone.
_OWN = {
    "transfer": ("transfer_learning_rate", "transfer_loss"),
    "distillation": ("distillation_learning_rate",),
    "lora": ("lora_learning_rate", "lora_rank", "lora_alpha"),
}


@dataclass
class Linearizing:
    """Which model becomes linear, where, and how long each stage trains."""

    _argument_group_name = "linearization"

    model: str = field(metadata={"help": "Trained model: a folder or a Hub id, of this package or one that converts."})
    layers: str = field(default="all", metadata={"help": "Layers that change, from 0 on, such as '0-9,12', or 'all'."})
    objective: str | None = field(
        default=None,
        metadata={"help": "{objectives}; settings as --objective.FIELD VALUE. Default: that of the model's shape."},
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: by size, at most what positions cover."}
    )
    transfer_steps: int = field(
        default=500, metadata={"help": "Steps in which each layer learns its own softmax attention's output."}
    )
    transfer_learning_rate: float = field(default=1e-2, metadata={"help": "Of the feature maps."})
    transfer_loss: Literal["output", "weights"] = field(
        default="output",
        metadata={"help": "Error of the attention's output (LoLCATs), or cross-entropy of its weights (Hedgehog)."},
    )
    distillation_steps: int = field(
        default=500, metadata={"help": "Steps in which all weights learn the objective and the source's predictions."}
    )
    distillation_learning_rate: float | None = field(default=None, metadata={"help": "Default: --learning_rate."})
    logit_weight: float = field(
        default=1.0, metadata={"help": "Weight of the source's predictions next to the objective."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Softens both predictions before they are compared."})
    lora_steps: int = field(
        default=0, metadata={"help": "Steps, after the others or in place of distillation, that train adapters alone."}
    )
    lora_learning_rate: float = field(default=1e-3, metadata={"help": "Of the adapters."})
    lora_rank: int = field(default=8, metadata={"help": "Rank of the adapters on the attention's projections."})
    lora_alpha: int = field(default=16, metadata={"help": "Their factor is this over the rank."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove an earlier linearization in --output_dir."}
    )

    def check(self) -> None:
        """Raises `ValueError` for steps, rates and weights that make no sense."""
        for name in STAGES:
            if getattr(self, f"{name}_steps") < 0:
                raise ValueError(f"--{name}_steps must not be negative, got {getattr(self, f'{name}_steps')}")
            rate = getattr(self, f"{name}_learning_rate")
            if rate is not None and rate <= 0:
                raise ValueError(f"--{name}_learning_rate must be above 0, got {rate}")
        if not any(self.steps(name) for name in STAGES):
            raise ValueError(
                "no stage has a step; give --transfer_steps, --distillation_steps or --lora_steps, or swap the"
                " attention alone with `hf-xformers convert`"
            )
        if self.lora_rank < 1:
            raise ValueError(f"--lora_rank must be at least 1, got {self.lora_rank}")
        for name, own in _OWN.items():
            if not self.steps(name):
                refuse_alone(self, own, f"--{name}_steps")
        if self.transfer_loss not in ("output", "weights"):
            raise ValueError(f"--transfer_loss is 'output' or 'weights', not {self.transfer_loss!r}")
        if not (self.distillation_steps or self.lora_steps):
            refuse_alone(self, ("logit_weight", "temperature"), "--distillation_steps or --lora_steps")
        self.teaching().check()

    def steps(self, stage: str) -> int:
        return int(getattr(self, f"{stage}_steps"))

    def teaching(self) -> Distillation:
        return Distillation(teacher=self.model, logit_weight=self.logit_weight, temperature=self.temperature)
