# SPDX-License-Identifier: Apache-2.0
"""Early exit of single tokens, or of sentences, in sequence labeling."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.base import RunningTokens
from ..core.call import Call
from ..core.components import bounded, register
from ..core.losses import step_share, token_cross_entropy
from ..core.outputs import XFormerEarlyExitTokenOutput
from .base import StackSpec
from .early_exit import Course, EarlyExitStack
from .entropy_exit import entropy
from .exits import Classifier, final_norm


class TokenCourse(Course):
    """Tokens halt: their states are copied to the layers above. halted: [R, T] boolean, or None: none has yet."""

    def __init__(self, watch: Any):
        super().__init__(watch)
        self.gathers = not watch.learns
        self.halted: Tensor | None = None

    def before(self, context: Call, gathers: bool) -> None:
        if gathers and self.halted is not None:
            context.keep(RunningTokens(~self.halted))

    def after(self, before: Tensor, hidden_states: Tensor) -> Tensor:
        return hidden_states if self.halted is None else torch.where(self.halted[..., None], before, hidden_states)

    def look(
        self, layer: int, hidden_states: Tensor, context: Call, rows: Tensor | None, gathers: bool
    ) -> Tensor | None:
        self.halted = self.watch(layer, hidden_states, context.query_padding_mask, rows)
        return self.watch.finished(rows) if gathers and self.halted is not None else None

    def narrow(self, stay: Tensor) -> None:
        self.halted = None if self.halted is None else self.halted[stay]


class TokenExitStack(EarlyExitStack):
    """Every layer once, in order; after each one the model input `exit_watch` says which tokens have halted. Their
    states are copied to the layers above unchanged, where the others still read them, and feed-forward sublayers leave
    them out. Rows whose tokens have all halted leave the batch. Where values must not steer the program, or states are
    recorded, all is computed and halted states are kept; both ways give the same."""

    def course(self, watch: Any, context: Call) -> Course:
        return TokenCourse(watch)


class TokenExits(nn.Module):
    """Classifiers of tokens after layers 1 .. L - 1 (Li et al. 2021, arXiv 2105.13878, section 3); the one after layer
    L is the model's own. u_i = H(p_i) / log C is a token's uncertainty, 0 where a token has no tag.

    `sentence`: all tokens of a text halt after the first layer with max_i u_i < delta. `token`: token i halts after
    the first layer with max(u_{i-k}, ..., u_{i+k}) < delta; its tag is the one of that layer's classifier.

    Training: sum_l l CE_l / sum_l l. In the second stage, `self_sampling`, tokens halt as they would, states are
    copied, and a classifier learns from the tokens that reach it.
    """

    def __init__(self, config, spec: TokenExitSpec):
        super().__init__()
        self.spec = spec
        self.classifiers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.num_labels) for _ in range(config.num_hidden_layers - 1)
        )

    def logits(self, model: Classifier, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[R, T, D] after layer 1, 2, ... -> [R, T, C]."""
        return self.classifiers[layer - 1](model.dropout(final_norm(model, hidden_states, padding_mask)))

    def certain(self, logits: Tensor, pending: Tensor) -> Tensor:
        """Which tokens [R, T] would halt after a layer with these logits. pending [R, T]: tokens with a tag that have
        not halted, whose uncertainty counts."""
        unsure = (entropy(logits) / math.log(max(logits.shape[-1], 2))).masked_fill(~pending, 0.0)
        if self.spec.exit_level == "sentence":
            return (unsure.amax(1, keepdim=True) < self.spec.exit_threshold).expand_as(pending)
        reach = self.spec.exit_window
        return F.max_pool1d(unsure[:, None], 2 * reach + 1, stride=1, padding=reach)[:, 0] < self.spec.exit_threshold

    def classify(
        self, model: Classifier, labels: Tensor | None, tagged: Tensor | None, inputs: dict[str, Any], count: Any
    ) -> XFormerEarlyExitTokenOutput:
        """The whole forward pass of `model`, an `XFormerForTokenClassification`. tagged [B, T]: tokens with a tag."""
        sampling = self.spec.training_stage == "self_sampling"
        learns = model.training and labels is not None
        halts = self.spec.exit_threshold > 0 and len(self.classifiers) > 0 and (not model.training or sampling)
        watch = _Watch(self, model, tagged, learns, halts) if tagged is not None and (learns or halts) else None
        base = model.model(**inputs, exit_watch=watch)
        logits = model.classifier(model.dropout(base.last_hidden_state))
        exit_layers: Any = None
        loss, share = None, step_share(labels, count)
        if labels is not None and labels.shape != logits.shape[:2]:
            raise ValueError(f"`labels` must be [batch, length] = {list(logits.shape[:2])}, got {list(labels.shape)}.")
        if learns and watch is not None and labels is not None:
            parts = [*watch.seen, (logits, watch.reaching())]
            weights = range(1, len(parts) + 1)
            losses = [
                weight * token_cross_entropy(answers, labels.masked_fill(~reached, -100))
                for weight, (answers, reached) in zip(weights, parts)
            ]
            loss = torch.stack(losses).sum() / sum(weights)
            loss = loss if share is None else share.of(loss)  # each is a mean over the tokens that reach its layer
        elif not model.training:
            exit_layers = torch.full(logits.shape[:2], len(self.classifiers) + 1, device=logits.device)
            if watch is not None and watch.answers is not None and watch.layers is not None:
                gone = watch.layers > 0
                logits = torch.where(gone[..., None], watch.answers, logits)
                exit_layers = torch.where(gone, watch.layers, exit_layers)
        if labels is not None and loss is None:
            loss = token_cross_entropy(logits, labels, count)
        return XFormerEarlyExitTokenOutput(
            loss=model.with_aux_losses(loss, base, share=share),
            logits=logits,
            exit_layers=exit_layers,
            **model.recorded(base, loss),
        )


class _Watch:
    """The exits of one batch. tagged [B, T]: tokens with a tag. learns: keeps every classifier's logits and the tokens
    that reach it. halts: whether tokens halt."""

    def __init__(self, exits: TokenExits, model: Classifier, tagged: Tensor, learns: bool, halts: bool):
        self.exits, self.model, self.tagged = exits, model, tagged
        self.learns, self.halts = learns, halts
        self.layers: Tensor | None = None  # [B, T], 0: running
        self.answers: Tensor | None = None  # [B, T, C]
        self.seen: list[tuple[Tensor, Tensor]] = []

    def reaching(self) -> Tensor:
        """[B, T]: the tokens that have not halted."""
        return torch.ones_like(self.tagged) if self.layers is None else self.layers == 0

    def finished(self, rows: Tensor | None) -> Tensor:
        """[R]: the rows without a token that has a tag to come."""
        running = (self.reaching() & self.tagged).any(1)
        return ~(running if rows is None else running[rows])

    def __call__(
        self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        """-> [R, T]: the tokens that have halted by now."""
        with nullcontext() if self.learns else torch.no_grad():
            logits = self.exits.logits(self.model, layer, hidden_states, padding_mask)
        if self.learns:
            self.seen.append((logits, self.reaching()))
        if not self.halts:
            return None
        if self.layers is None or self.answers is None:
            self.layers = torch.zeros_like(self.tagged, dtype=torch.long)
            self.answers = torch.zeros_like(logits.detach())
        layers, tagged = (self.layers, self.tagged) if rows is None else (self.layers[rows], self.tagged[rows])
        pending = tagged & (layers == 0)
        halts = pending & self.exits.certain(logits.detach(), pending)
        answers = self.answers if rows is None else self.answers[rows]
        answers = torch.where(halts[..., None], logits.detach(), answers)
        layers = torch.where(halts, layer, layers)
        self.answers = answers if rows is None else self.answers.index_copy(0, rows, answers)
        self.layers = layers if rows is None else self.layers.index_copy(0, rows, layers)
        return layers > 0


@register("stack", "token_exit", aliases=("token_early_exit",))
class TokenExitSpec(StackSpec):
    """Tokens, or sentences, halt after the first layer whose classifier is sure of their tags (SENTEE, TOKEE).

    Args:
        exit_level: `token` or `sentence`.
        exit_window: k, how many tokens to either side have to be certain, too.
        exit_threshold: delta, a share of log C, the entropy of a guess; 0: never.
        training_stage: `joint` trains all classifiers on all tokens; `self_sampling`, after that, lets tokens halt in
            training as they will.
    """

    inputs: ClassVar[tuple[str, ...]] = ("exit_watch",)
    exits = "tokens"
    supports = frozenset({"unpadding"})
    summary = "tokens halt after the first layer whose classifier is sure of their tags"

    exit_level: Literal["token", "sentence"] = "token"
    exit_window: int = bounded(2, least=0)
    exit_threshold: float | int = bounded(0, least=0)
    training_stage: Literal["joint", "self_sampling"] = "joint"

    def check(self, config) -> None:
        if config.classifier_transform != "none":
            raise ValueError(
                "The classifiers inside stack 'token_exit' are linear, got"
                f" `classifier_transform={config.classifier_transform!r}`; leave it out."
            )
        if config.tag_decoder != "softmax":
            raise ValueError(
                "stack 'token_exit' fixes a token's tag when it halts, and `tag_decoder='crf'` chooses tags together;"
                " use `tag_decoder='softmax'`, or the stack 'plain'."
            )

    def build_exits(self, config) -> nn.Module:
        return TokenExits(config, self)

    def build(self, config, **where) -> TokenExitStack:
        if config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                "stack 'token_exit' labels the tokens of an encoder; use it with `is_decoder=False` and"
                " `is_encoder_decoder=False`, or take the stack 'plain'."
            )
        return TokenExitStack(config.num_hidden_layers)
