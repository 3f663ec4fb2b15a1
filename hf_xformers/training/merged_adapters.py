# SPDX-License-Identifier: Apache-2.0
"""LoRA in a model while it trains, and in its weights when it is done: what is saved at the end is a plain
checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

# The projections of an attention (Zhang et al. 2024, arXiv 2410.10254, section 3.2).
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class PutIn(Protocol):
    """What stands in a model while it trains, and leaves a plain model."""

    def put(self, model: Any) -> None:
        """Before the optimizer is made, and before a checkpoint is read."""

    def merge(self, model: Any) -> None:
        """At the end, before the model is saved."""


@dataclass(frozen=True)
class MergedLora:
    """W + alpha / rank * B A on the projections of every attention (Hu et al. 2021, arXiv 2106.09685). Checkpoints in
    the middle of the run hold A, B and W; [`MergedLora.merge`] adds them up."""

    rank: int = 8
    alpha: int = 16

    def put(self, model: nn.Module) -> None:
        """Freezes the model and adds the adapters.

        Raises:
            ValueError: it has none of the projections.
        """
        import peft

        names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        targets = [name for name in TARGETS if name in names]
        if not targets:
            raise ValueError(f"LoRA adapts {', '.join(TARGETS)}, of which the model has none; leave it out")
        config = peft.LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0, target_modules=targets)
        peft.inject_adapter_in_model(config, model)

    def merge(self, model: nn.Module) -> None:
        """Adds the adapters to the weights, takes them out, and lets every parameter train again."""
        from ..compat import BaseTunerLayer

        found: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
        for name, layer in found:
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
        model.requires_grad_(True)
