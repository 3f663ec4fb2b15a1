"""The classifiers inside an early-exit stack, and what they decide during one call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.losses import with_aux_losses
from ..core.outputs import XFormerEarlyExitClassifierOutput
from ..core.pooling import pool
from ..modeling_xformer import Pooler
from ..stacks.early_exit import EntropyExitSpec, PatienceExitSpec


def entropy(logits: Tensor) -> Tensor:
    """-sum_c p_c log p_c in nats, p = softmax(logits), float32 at least. [R, C] -> [R]."""
    logs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    return -(logs.exp() * logs).sum(-1)


class EarlyExits(nn.Module):
    """Classifiers after layers 1 .. L - 1 of a sequence classifier; the one after layer L is the model's own.

    They read a layer's states as the last classifier reads the last layer's: through the final norm where there is one.
    """

    def logits(self, model: nn.Module, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[R, T, D] after layer 1, 2, ... -> [R, num_labels]."""
        raise NotImplementedError

    def rule(self, model: nn.Module, batch: int) -> Any | None:
        """`rule(layer, logits [R, C], rows [R] or None) -> [R] boolean`, or None if no row can leave early."""
        raise NotImplementedError

    def training_loss(self, losses: list[Tensor]) -> Tensor:
        """The objective from the losses of the classifiers 1 .. L."""
        raise NotImplementedError

    trunk_learns = True  # False: no gradient goes into the layers and the last classifier

    def classify(self, model: nn.Module, labels: Tensor | None, inputs: dict[str, Any]):
        """The whole forward pass of `model`, an `XFormerForSequenceClassification`."""
        watch: _Collector | _Run | None = None
        if model.training and labels is not None:
            watch = _Collector()
        elif not model.training:
            given = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            rule = self.rule(model, given.shape[0])
            watch = None if rule is None else _Run(self, model, rule)
        frozen = watch is not None and model.training and not self.trunk_learns
        with torch.no_grad() if frozen else nullcontext():
            base = model.model(**inputs, exit_watch=watch)
            logits = model.classifier(model.dropout(model.pooled(base, inputs.get("attention_mask"))))
        exit_layers = None
        if not model.training:
            count = torch.full_like(logits[:, 0], model.config.num_hidden_layers, dtype=torch.long)
            exit_layers = count
            if isinstance(watch, _Run) and watch.running is not None:
                logits = torch.where(watch.running[:, None], logits, watch.answers)
                exit_layers = torch.where(watch.running, count, watch.layers)
        loss = None
        if labels is not None:

            def loss_of(answers: Tensor) -> Tensor:
                return model.loss_function(labels=labels, pooled_logits=answers, config=model.config)

            if isinstance(watch, _Collector):
                inner = [self.logits(model, number, *seen) for number, seen in enumerate(watch.seen, start=1)]
                loss = self.training_loss([loss_of(answers) for answers in (*inner, logits)])
            else:
                loss = loss_of(logits)
        return XFormerEarlyExitClassifierOutput(
            loss=with_aux_losses(loss, base.aux_losses),
            logits=logits,
            exit_layers=exit_layers,
            **model.recorded(base, loss),
        )


class _Collector:
    """Keeps every layer's output, for the losses of a training step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None) -> None:
        self.seen.append((hidden_states, padding_mask))


class _Run:
    """The exits of one batch: answers [B, C] and layers [B] of the rows that left, `running` [B]: those that did not."""

    def __init__(self, exits: EarlyExits, model: nn.Module, rule: Any):
        self.exits, self.model, self.rule = exits, model, rule
        self.answers: Tensor | None = None
        self.layers: Tensor | None = None
        self.running: Tensor | None = None

    def __call__(self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None) -> Tensor:
        logits = self.exits.logits(self.model, layer, hidden_states, padding_mask)
        leaves = self.rule(layer, logits, rows)
        if self.running is None:
            self.answers = torch.zeros_like(logits)
            self.layers = torch.zeros_like(leaves, dtype=torch.long)
            self.running = torch.ones_like(leaves)
        if rows is None:  # the whole batch, among it rows that have left before
            leaves = leaves & self.running
            everyone = leaves
        else:
            logits = torch.zeros_like(self.answers).index_copy(0, rows, logits)
            everyone = torch.zeros_like(self.running).index_copy(0, rows, leaves)
        self.answers = torch.where(everyone[:, None], logits, self.answers)
        self.layers = torch.where(everyone, layer, self.layers)
        self.running = self.running & ~everyone
        return leaves


def _final_norm(model: nn.Module, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
    norm = model.model.trunk.final_norm
    if norm is None:
        return hidden_states
    return norm(hidden_states, mask=padding_mask) if getattr(norm, "over_tokens", False) else norm(hidden_states)


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
    """DeeBERT's off-ramps (Xin et al. 2020, arXiv 2004.12993): after layer l a ramp of its own, z_l; a text leaves after the
    first l with H(softmax(z_l)) < S_l.

    Training has two stages. `trunk`: the loss of the last classifier, for all layers. `ramps`: the sum of the losses of
    ramps 1 .. L - 1, with everything else frozen; no graph is kept of the layers. Their dropout follows the mode that they
    are in, as in the released code (`model.model.eval()` turns it off).
    """

    def __init__(self, config, spec: EntropyExitSpec):
        super().__init__()
        self.spec = spec
        self.ramps = nn.ModuleList(Ramp(config) for _ in range(config.num_hidden_layers - 1))

    @property
    def trunk_learns(self) -> bool:
        return self.spec.training_stage == "trunk"

    def begin_ramps(self, model: nn.Module) -> None:
        """Turns `model` to the second stage: ramps start from the last classifier's pooler, if there is one, and only
        they learn. The stage is written to the config."""
        pooler = model.model.pooler
        for ramp in self.ramps:
            if pooler is not None:
                ramp.pooler.load_state_dict(pooler.state_dict())
        self.spec.training_stage = "ramps"
        self.freeze(model)

    def freeze(self, model: nn.Module) -> None:
        """Says which parameters learn in this stage."""
        inside = {id(parameter) for parameter in self.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_((id(parameter) in inside) != self.trunk_learns)

    def logits(self, model: nn.Module, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.ramps[layer - 1](_final_norm(model, hidden_states, padding_mask), padding_mask)

    def rule(self, model: nn.Module, batch: int):
        if not self.spec.exits_early or not self.ramps:
            return None
        if model.config.num_labels == 1 or model.config.problem_type in ("regression", "multi_label_classification"):
            raise ValueError(
                f"Entropy is defined for one choice among several classes, not for {model.config.num_labels} label(s) with "
                f"`problem_type` {model.config.problem_type!r}; set `threshold` to -1, or use the stack 'patience_exit'."
            )
        return lambda layer, logits, rows: entropy(logits) < self.spec.at(layer)

    def training_loss(self, losses: list[Tensor]) -> Tensor:
        if self.trunk_learns or len(losses) == 1:
            return losses[-1]
        return torch.stack(losses[:-1]).sum()


class PatienceExits(EarlyExits):
    """PABEE's classifiers (Zhou et al. 2020, arXiv 2006.04152): one linear map for each layer, all behind the model's one
    pooler. With y_l the answer after layer l, a counter starts at 0, grows by 1 whenever y_l = y_{l-1} and returns to 0
    otherwise; a text leaves when it reaches P, so not before layer P + 1. Numbers agree if |y_l - y_{l-1}| < tau; a set of
    labels agrees if all of it does.

    All classifiers are trained at once: sum_l l * loss_l / sum_l l.
    """

    def __init__(self, config, spec: PatienceExitSpec):
        super().__init__()
        self.spec = spec
        self.classifiers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.num_labels) for _ in range(config.num_hidden_layers - 1)
        )

    def freeze(self, model: nn.Module) -> None:
        """Everything learns."""

    def logits(self, model: nn.Module, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        states, pooler = _final_norm(model, hidden_states, padding_mask), model.model.pooler
        if pooler is not None:
            vector = pooler(states, padding_mask)
        else:
            how = model.config.classifier_pooling
            vector = pool(states, padding_mask, "first" if how == "auto" else how)
        return self.classifiers[layer - 1](model.dropout(vector))

    def rule(self, model: nn.Module, batch: int):
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
