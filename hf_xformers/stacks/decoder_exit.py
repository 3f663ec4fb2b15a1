# SPDX-License-Identifier: Apache-2.0
"""Tokens of a decoder that leave at different depths: their states are copied to the layers above."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..blocks.base import XFormerLayer
from ..core.call import Call, can_inspect
from ..core.components import bounded, register
from ..core.losses import token_cross_entropy
from .base import Stack, StackSpec
from .driver import Pass
from .early_exit import Course
from .plain import PlainStack
from .token_exit import TokenCourse, TokenExitStack

# A language model (`XFormerForCausalLM`, `XFormerForSeq2SeqLM`), which stands above the stacks.
LanguageModel = Any


class DecoderCourse(TokenCourse):
    """As in an encoder, but that no row leaves the batch: once all tokens have halted, layers are passed over."""

    def __init__(self, watch: Any, context: Call):
        super().__init__(watch)
        self.gathers = False
        recorded = context.output_hidden_states or context.output_attentions
        self.steers = can_inspect() and not (watch.learns or recorded)
        self.done = False

    def before(self, context: Call, gathers: bool) -> None:
        super().before(context, self.steers)

    def look(
        self, layer: int, hidden_states: Tensor, context: Call, rows: Tensor | None, gathers: bool
    ) -> Tensor | None:
        super().look(layer, hidden_states, context, rows, False)
        real = context.query_padding_mask
        if self.halted is not None and real is not None:
            self.halted = self.halted | ~real
        self.done = self.steers and self.halted is not None and bool(self.halted.all())
        return None


class DecoderExitStack(TokenExitStack):
    """h_t^m = h_t^n for all layers m > n after the layer n where token t leaves; later tokens read the keys and values
    that the layers above make of this copy (Elbayad, Gu, Grave and Auli 2020, arXiv 1910.10073, section 3).

    The model input `exit_watch` says after each layer which tokens have left. A layer above all tokens of a call gives
    a generation cache their keys and values, and does nothing else; one above some of them leaves these out of its
    feed-forward sublayers. A token decides by its own state, which the exits of later tokens do not change: generation
    token by token leaves at the same depths as one pass over the whole text.
    """

    def course(self, watch: Any, context: Call) -> Course:
        return DecoderCourse(watch, context)

    def run_layer(self, course: Course, layer: XFormerLayer, run: Pass, step: int) -> None:
        if not (isinstance(course, DecoderCourse) and course.done):
            super().run_layer(course, layer, run, step)
        elif run.past_key_values is not None:
            layer.remember(run.hidden_states, run.context, run.past_key_values, step)


class LanguageExits(nn.Module):
    """p(y | h_t^n) = softmax(W norm(h_t^n)) after each layer n, with the model's own W and final norm.

    A token leaves after the first layer n < L with max_y p(y | h_t^n) > tau (`confidence`), or with chi_t^n =
    sigmoid(w_n h_t^n + b_n) > tau (`gates`). Training:

        aligned: sum_n w_n CE_n / sum_n w_n, where every layer has run for all tokens (section 3.1);
        mixed: every token leaves at a depth drawn evenly from 1 .. L, and is predicted there (section 3.1).

    With gates, + alpha times the mean of -log q_t(n*_t), where q_t(n) = chi_t^n prod_{m < n} (1 - chi_t^m) is the
    probability to leave after n (section 3.2, token-specific depth), and n*_t = argmax_n sum_s exp(-(t - s)^2 / sigma)
    log p(y_s | h_s^n) - lambda n has the largest likelihood nearby (section 3.2).
    """

    def __init__(self, config, spec: DecoderExitSpec):
        super().__init__()
        self.spec, self.depth = spec, config.num_hidden_layers
        count = self.depth - 1 if spec.halting == "gates" else 0
        self.gates = nn.ModuleList(nn.Linear(config.hidden_size, 1) for _ in range(count))

    def watch(self, model: LanguageModel, learns: bool) -> ExitRun | None:
        """What looks at the layers of one call; None: nobody leaves, and nobody learns to."""
        threshold = self.spec.threshold
        if self.depth < 2 or (not learns and (model.training or threshold is None)):
            return None
        return ExitRun(self, model, learns)

    def logits(self, model: LanguageModel, hidden_states: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] after some layer -> [B, T, V]."""
        tower = model.get_decoder()
        if tower.final_norm is not None:
            given = {"mask": real} if tower.final_normalization.over_tokens else {}
            hidden_states = tower.final_norm(hidden_states, **given)
        return model.lm_head(hidden_states)

    def sure(self, model: LanguageModel, layer: int, hidden_states: Tensor, real: Tensor | None) -> Tensor:
        """[B, T]: who would leave after this layer."""
        threshold = 1.0 if self.spec.threshold is None else self.spec.threshold
        if self.spec.halting == "gates":
            gate = self.gates[layer - 1](hidden_states).squeeze(-1)
            return torch.sigmoid(gate if gate.dtype == torch.float64 else gate.float()) > threshold
        logits = self.logits(model, hidden_states, real)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return (wide.amax(-1) - wide.logsumexp(-1)).exp() > threshold

    def loss(self, model: LanguageModel, run: ExitRun, logits: Tensor, targets: Tensor, count: Any) -> Tensor:
        """logits [B, T, V] after the last layer, or where tokens left; targets [B, T], -100: none."""
        if self.spec.training == "mixed":
            return token_cross_entropy(logits, targets, count)
        answers = [*(self.logits(model, *seen) for seen in run.seen), logits]
        weights = [n if self.spec.loss_weights == "depth" else 1 for n in range(1, len(answers) + 1)]
        losses = [w * token_cross_entropy(one, targets, count) for w, one in zip(weights, answers, strict=True)]
        loss = torch.stack(losses).sum() / sum(weights)
        if not len(self.gates):
            return loss
        return loss + self.spec.exit_weight * self.halting_loss(run, answers, targets, count)

    def halting_loss(self, run: ExitRun, answers: list[Tensor], targets: Tensor, count: Any) -> Tensor:
        """The mean over tokens with a target of -log q_t(n*_t)."""
        best = self.best_layers([one.detach() for one in answers], targets)
        logs = self.log_exits([states for states, _ in run.seen])
        return token_cross_entropy(logs, best.masked_fill(targets == -100, -100), count)

    def log_exits(self, states: list[Tensor]) -> Tensor:
        """log q [B, T, L] by the states [B, T, D] after layers 1 .. L - 1. It is normalized: a softmax keeps it."""
        found = [gate(one).squeeze(-1) for gate, one in zip(self.gates, states, strict=True)]
        scores = torch.stack([one if one.dtype == torch.float64 else one.float() for one in found], dim=-1)
        stays = F.pad(F.logsigmoid(-scores).cumsum(-1), (1, 0))
        return stays + F.pad(F.logsigmoid(scores), (0, 1))

    def best_layers(self, answers: list[Tensor], targets: Tensor) -> Tensor:
        """n* [B, T], counted from 0."""
        known = targets != -100
        wanted = targets.masked_fill(~known, 0)[..., None]
        wide = [one if one.dtype == torch.float64 else one.float() for one in answers]
        gains = torch.stack([one.log_softmax(-1).gather(-1, wanted).squeeze(-1) for one in wide])
        gains = gains.masked_fill(~known, 0.0)
        if self.spec.smoothing:
            place = torch.arange(targets.shape[1], device=targets.device)
            near = (-((place[:, None] - place) ** 2) / self.spec.smoothing).exp().to(gains.dtype)
            gains = gains @ near
        depth = torch.arange(len(answers), device=targets.device)[:, None, None]
        return (gains - self.spec.depth_penalty * depth).argmax(0)


class ExitRun:
    """The exits of one call. layers [B, T]: after which one each token left, 0: none yet."""

    def __init__(self, exits: LanguageExits, model: LanguageModel, learns: bool):
        self.exits, self.model, self.learns = exits, model, learns
        self.layers: Tensor | None = None
        self.drawn: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __call__(
        self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        """-> [B, T]: the tokens that have left by now."""
        if self.learns and self.exits.spec.training == "aligned":
            self.seen.append((hidden_states, padding_mask))
            return None
        shape, device = hidden_states.shape[:2], hidden_states.device
        if self.learns:
            if self.drawn is None:
                self.drawn = torch.randint(1, self.exits.depth + 1, shape, device=device)
            return self.drawn <= layer
        if self.layers is None:
            self.layers = torch.zeros(shape, dtype=torch.long, device=device)
        with torch.no_grad():
            sure = self.exits.sure(self.model, layer, hidden_states, padding_mask)
        self.layers = self.layers.masked_fill((self.layers == 0) & sure, layer)
        return self.layers > 0

    def exit_layers(self) -> Tensor | None:
        """[B, T]: after which layer (1, 2, ...) each token left."""
        if self.layers is None:
            return None
        return self.layers.masked_fill(self.layers == 0, self.exits.depth)


@register("stack", "decoder_exit", aliases=("depth_adaptive",))
class DecoderExitSpec(StackSpec):
    """Tokens of a decoder leave after the first layer that is sure of the next one.

    Args:
        halting: by the `confidence` of the prediction, or by learned `gates`.
        exit_threshold: tau (`None`: 0.5 for gates; with `confidence` no token leaves early).
        training: of the layers' predictions, `aligned` (all of all tokens) or `mixed` (at drawn depths).
        loss_weights: of the layers in aligned training, `uniform`, or the `depth` n.
        exit_weight: alpha, of the loss of the gates.
        smoothing: sigma, how near tokens are whose likelihood counts for a gate's target (0: its own alone).
        depth_penalty: lambda, log likelihood that a further layer has to bring. In an encoder-decoder the encoder is
            plain.
    """

    inputs: ClassVar[tuple[str, ...]] = ("exit_watch",)
    summary = "a decoder's tokens leave after the first layer that is sure of the next one"
    exits = "decoder"
    shares = "prepared"
    layers_apart = False  # keys of tokens that have left are made outside of a layer's call

    halting: Literal["confidence", "gates"] = "confidence"
    exit_threshold: float | int | None = bounded(None, least=0, most=1)
    training: Literal["aligned", "mixed"] = "aligned"
    loss_weights: Literal["uniform", "depth"] = "uniform"
    exit_weight: float | int = bounded(0.1, least=0)
    smoothing: float | int = bounded(0.0, least=0)
    depth_penalty: float | int = bounded(0.0, least=0)

    @property
    def threshold(self) -> float | None:
        """tau; None: no token leaves early."""
        if self.exit_threshold is None and self.halting == "gates":
            return 0.5
        return self.exit_threshold

    def check_fields(self) -> None:
        if self.halting == "gates" and self.training == "mixed":
            raise ValueError(
                "decoder_exit's gates learn from what all layers predict, which `training='mixed'` does not compute;"
                " choose `training='aligned'`."
            )

    def check(self, config) -> None:
        if not config.is_decoder and not config.is_encoder_decoder:
            raise ValueError(
                "stack 'decoder_exit' lets tokens of a decoder leave early; use it with `is_decoder=True` or"
                " `is_encoder_decoder=True`, or take 'token_exit' for the tokens of an encoder."
            )
        kinds = [entry.kind for entry in config.block.plan(config, 0, False)]
        fits = config.attention.keeps_keys_alone and config.block.cache_layer(config) is None
        if config.is_decoder and not (fits and kinds[0] == "attention" and kinds.count("attention") == 1):
            what = "block" if config.attention.keeps_keys_alone else "attention"
            raise ValueError(
                f"stack 'decoder_exit' keeps keys of tokens that have left, as {what}"
                f" {getattr(config, what).type!r} does not; use attention 'dense' and block 'vanilla'."
            )

    def build_exits(self, config) -> nn.Module:
        return LanguageExits(config, self)

    def build(self, config, **where) -> Stack:
        return DecoderExitStack(config.num_hidden_layers) if config.is_decoder else PlainStack()
