# SPDX-License-Identifier: Apache-2.0
"""Trainer of masked image modeling: the held-out error of hidden pixels compared with that of one picture for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_utils import EvalPrediction

from .trainer import XFormerTrainer
from .trainer_evaluation import all_rows


def patches_of(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """[B, C, H, W] -> [B, N, C, P, P], row by row."""
    tall, wide = patch
    parts = images.unflatten(3, (-1, wide)).unflatten(2, (-1, tall))  # [B, C, rows, P, columns, P]
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


class MaskedImageTrainer(XFormerTrainer):
    """[`XFormerTrainer`] whose evaluation says how far the pixels of hidden patches are off (mean absolute error), and
    how far those of `median_picture` [C, H, W] are, put in place of them (`baseline_loss`). patch: height and
    width."""

    def __init__(self, *args: Any, median_picture: Tensor, patch: tuple[int, int], **kwargs: Any) -> None:
        self.median_picture, self.patch = median_picture, patch
        super().__init__(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        truth = patches_of(inputs["pixel_values"].float(), self.patch)
        made = patches_of(outputs["reconstruction"].float(), self.patch)
        hidden = inputs["bool_masked_pos"] != 0
        usual = patches_of(self.median_picture.to(truth)[None], self.patch)
        errors = torch.stack(
            [(hidden * (guess - truth).abs().mean((2, 3, 4))).sum(1) for guess in (made, usual)], dim=1
        )
        rows = torch.cat([errors, hidden.sum(1, keepdim=True).to(errors)], dim=1)  # [B, 3]: errors and patches
        losses = outputs.get("aux_losses") or {}
        names = sorted(losses)
        self._eval_names = tuple(f"aux_{name}" for name in names)
        columns = [losses[name].detach().float().mean().expand(len(rows), 1) for name in names]
        rows = torch.cat([rows, *columns], dim=1)
        loss = rows[:, 0].sum() / rows[:, 2].sum().clamp(min=1)
        return loss, rows, torch.zeros_like(rows[:, 0])  # Trainer wants labels besides predictions

    def _summarise(self, prediction: EvalPrediction) -> dict[str, float]:
        rows = all_rows(prediction).astype(np.float64)
        count = max(rows[:, 2].sum(), 1.0)
        figures = {"loss": rows[:, 0].sum() / count, "baseline_loss": rows[:, 1].sum() / count}
        further = {name: rows[:, 3 + place].mean() for place, name in enumerate(self._eval_names)}
        return {name: float(value) for name, value in {**figures, **further}.items()}
