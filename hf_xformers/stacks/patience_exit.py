# SPDX-License-Identifier: Apache-2.0
"""Early exit by patience: PABEE's classifiers that confirm one another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.pooling import pool
from .early_exit import EarlyExitSpec
from .exits import Classifier, EarlyExits, final_norm


class PatienceExits(EarlyExits):
    """PABEE's classifiers (Zhou et al. 2020, arXiv 2006.04152): one linear map for each layer, all behind the model's
    one pooler. With y_l the answer after layer l, a counter starts at 0, grows by 1 whenever y_l = y_{l-1} and returns
    to 0 otherwise; a text leaves when it reaches P, so not before layer P + 1. Numbers agree if |y_l - y_{l-1}| < tau;
    a set of labels agrees if all of it does.

    All classifiers are trained at once: sum_l l * loss_l / sum_l l.
    """

    def __init__(self, config, spec: PatienceExitSpec):
        super().__init__()
        self.spec = spec
        self.classifiers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.num_labels) for _ in range(config.num_hidden_layers - 1)
        )

    def freeze(self, model: Classifier) -> None:
        """Everything learns."""

    def logits(self, model: Classifier, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        states, pooler = final_norm(model, hidden_states, padding_mask), model.model.pooler
        if pooler is not None:
            vector = pooler(states, padding_mask)
        else:
            how = model.config.classifier_pooling
            vector = pool(states, padding_mask, "first" if how == "auto" else how)
        return self.classifiers[layer - 1](model.dropout(vector))

    def rule(self, model: Classifier):
        patience = self.spec.resolved(model.config)
        if not patience or patience >= model.config.num_hidden_layers:
            return None
        return _Patience(patience, self.spec.regression_threshold, self.kind(model.config))

    @staticmethod
    def kind(config) -> str:
        """`problem_type`, or what it will be taken for."""
        if config.problem_type is not None:
            return config.problem_type
        return "regression" if config.num_labels == 1 else "single_label_classification"

    def training_loss(self, losses: list[Tensor]) -> Tensor:
        weights = torch.arange(1, len(losses) + 1, device=losses[0].device, dtype=losses[0].dtype)
        return (torch.stack(losses) * weights).sum() / weights.sum()


class _Patience:
    """Counts each row's confirmations."""

    def __init__(self, patience: int, tolerance: float, kind: str):
        self.patience, self.tolerance, self.kind = patience, tolerance, kind
        self.last: Tensor | None = None  # [B, ...] the answers before
        self.count: Tensor | None = None  # [B]

    def answers(self, logits: Tensor) -> Tensor:
        if self.kind == "regression":
            return logits
        return logits > 0 if self.kind == "multi_label_classification" else logits.argmax(-1, keepdim=True)

    def __call__(self, layer: int, logits: Tensor, rows: Tensor | None) -> Tensor:
        now = self.answers(logits)
        if self.last is None or self.count is None:
            self.last = now
            self.count = torch.zeros(now.shape[0], dtype=torch.long, device=now.device)
        before = self.last if rows is None else self.last[rows]
        agrees = (now - before).abs() < self.tolerance if self.kind == "regression" else now == before
        count = self.count if rows is None else self.count[rows]
        if layer > 1:
            count = torch.where(agrees.all(-1), count + 1, 0)
        self.last = now if rows is None else self.last.index_copy(0, rows, now)
        self.count = count if rows is None else self.count.index_copy(0, rows, count)
        return count >= self.patience


@register("stack", "patience_exit", aliases=("pabee",))
class PatienceExitSpec(EarlyExitSpec):
    """A text leaves when `patience` classifiers in a row have confirmed the answer before theirs (PABEE).

    patience: P; 0: never leave early; `None`: half the layers (6 of 12, what the paper recommends). It acts in
    evaluation mode. regression_threshold: tau, how far two numbers may be apart that still confirm one another.
    """

    summary = "a text leaves when enough classifiers in a row agree"

    patience: int | None = bounded(None, least=0)
    regression_threshold: float | int = bounded(0.1, above=0)

    def resolved(self, config) -> int:
        """P for this config."""
        return config.num_hidden_layers // 2 if self.patience is None else self.patience

    def settings(self, config) -> dict[str, tuple]:
        return {"patience": (0, *range(config.num_hidden_layers - 1, 0, -1))}

    def check(self, config) -> None:
        super().check(config)
        if self.patience is not None and self.patience >= max(config.num_hidden_layers, 1):
            raise ValueError(
                f"patience_exit with `patience` {self.patience} never leaves {config.num_hidden_layers} layers early;"
                " choose less than the number of layers, or 0 to use all on purpose."
            )

    def build_exits(self, config) -> nn.Module:
        return PatienceExits(config, self)
