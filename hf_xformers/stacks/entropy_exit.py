# SPDX-License-Identifier: Apache-2.0
"""Early exit by entropy: DeeBERT's off-ramps."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.components import register
from ..core.pooling import Pooler
from .early_exit import EarlyExitSpec
from .exits import Classifier, EarlyExits, final_norm


def entropy(logits: Tensor) -> Tensor:
    """-sum_c p_c log p_c in nats, p = softmax(logits), float32 at least. [R, C] -> [R]."""
    logs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    return -(logs.exp() * logs).sum(-1)


class Ramp(nn.Module):
    """tanh(W h + b) of the first token, dropout, and a linear classifier (Xin et al. 2020, section 2)."""

    def __init__(self, config):
        super().__init__()
        self.pooler = Pooler(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.classifier(self.dropout(self.pooler(hidden_states, padding_mask)))


class EntropyExits(EarlyExits):
    """DeeBERT's off-ramps (Xin et al. 2020, arXiv 2004.12993): after layer l a ramp of its own, z_l; a text leaves
    after the first l with H(softmax(z_l)) < S_l.

    Training has two stages. `trunk`: the loss of the last classifier, for all layers. `ramps`: the sum of the losses
    of ramps 1 .. L - 1, with everything else frozen; no graph is kept of the layers. Their dropout follows the mode
    that they are in, as in the released code (`model.model.eval()` turns it off).
    """

    def __init__(self, config, spec: EntropyExitSpec):
        super().__init__()
        self.spec = spec
        self.ramps = nn.ModuleList(Ramp(config) for _ in range(config.num_hidden_layers - 1))

    @property
    def trunk_learns(self) -> bool:
        return self.spec.training_stage == "trunk"

    def begin_ramps(self, model: Classifier) -> None:
        """Turns `model` to the second stage: ramps start from the last classifier's pooler, if there is one, and only
        they learn. The stage is written to the config."""
        pooler = model.model.pooler
        ramp: Any
        for ramp in self.ramps:
            if pooler is not None:
                ramp.pooler.load_state_dict(pooler.state_dict())
        self.spec.training_stage = "ramps"
        self.freeze(model)

    def freeze(self, model: Classifier) -> None:
        """Says which parameters learn in this stage."""
        inside = {id(parameter) for parameter in self.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_((id(parameter) in inside) != self.trunk_learns)

    def logits(self, model: Classifier, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.ramps[layer - 1](final_norm(model, hidden_states, padding_mask), padding_mask)

    def rule(self, model: Classifier):
        if not self.spec.exits_early or not self.ramps:
            return None
        if model.config.num_labels == 1 or model.config.problem_type in ("regression", "multi_label_classification"):
            raise ValueError(
                f"Entropy is defined for one choice among several classes, not for {model.config.num_labels} label(s)"
                f" with `problem_type` {model.config.problem_type!r}; set `threshold` to -1, or use the stack"
                " 'patience_exit'."
            )
        return lambda layer, logits, rows: entropy(logits) < self.spec.at(layer)

    def training_loss(self, losses: list[Tensor]) -> Tensor:
        if self.trunk_learns or len(losses) == 1:
            return losses[-1]
        return torch.stack(losses[:-1]).sum()


@register("stack", "entropy_exit", aliases=("deebert",))
class EntropyExitSpec(EarlyExitSpec):
    """A text leaves after the first layer whose classifier's entropy is below a threshold (DeeBERT).

    threshold: S in nats, one for all layers or one for each of the first L - 1; negative: never leave there. It acts
    in evaluation mode. training_stage: `trunk` trains all layers with the last classifier; `ramps` trains the
    classifiers inside, with all the rest frozen (`model.exits.begin_ramps(model)` turns to it).
    """

    summary = "a text leaves after the first layer whose classifier has low entropy"

    threshold: float | int | tuple = -1
    training_stage: Literal["trunk", "ramps"] = "trunk"

    @property
    def exits_early(self) -> bool:
        """Whether any row can leave before the last layer."""
        return any(value > 0 for value in self._values())

    def _values(self) -> tuple:
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)

    def at(self, layer: int) -> float:
        """The threshold after layer 1, 2, ..."""
        values = self._values()
        return float(values[layer - 1] if len(values) > 1 else values[0])

    def settings(self, config) -> dict[str, tuple]:
        """Shares of log C, the entropy of a guess."""
        most = math.log(max(config.num_labels, 2))
        return {"threshold": (-1, *(round(share * most, 4) for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)))}

    def check_fields(self) -> None:
        if not self._values() or not all(isinstance(value, (int, float)) for value in self._values()):
            raise ValueError(
                f"entropy_exit needs a number as `threshold`, or one for each exit, got {self.threshold!r}."
            )

    def check(self, config) -> None:
        super().check(config)
        count = config.num_hidden_layers - 1
        if isinstance(self.threshold, tuple) and len(self.threshold) != count:
            raise ValueError(
                f"entropy_exit got {len(self.threshold)} thresholds, but {config.num_hidden_layers} layers have"
                f" {count} exits before the last; give one for each, or one number."
            )

        if self.training_stage == "ramps" and count < 1:
            raise ValueError(
                f"entropy_exit has no classifier before the last of {config.num_hidden_layers} layers to train in the"
                " stage 'ramps'; use `training_stage='trunk'` or more layers."
            )

    def build_exits(self, config) -> nn.Module:
        return EntropyExits(config, self)
