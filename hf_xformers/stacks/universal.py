# SPDX-License-Identifier: Apache-2.0
"""The Universal Transformer's stack: the same layers at every depth, with per-token halting."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core.call import add_losses, can_inspect
from ..core.components import bounded, register
from ..core.reading_weights import weight_of
from ..position.sinusoidal_absolute import sinusoids
from .base import Stack, StackSpec
from .driver import Pass, StackOutput


class Halting(nn.Module):
    """Adaptive computation time of one forward call (Graves 2016, arXiv 1603.08983, section 2), per token.

    A token's halting probabilities p_1, p_2, ... are spent until their sum would exceed 1 - epsilon; it halts at that
    step N, where what is left, R = 1 - sum_{n<N} p_n, takes the place of p_N. Probabilities and sums are float32 at
    least.
    """

    def __init__(self, config, spec: UniversalSpec):
        super().__init__()
        self.spec = spec
        self.gate = nn.Linear(config.hidden_size, 1)

    def initialize(self, config, init) -> None:
        init.constant_(self.gate.bias, self.spec.act_halting_bias_init)

    def probability(self, states: Tensor) -> Tensor:
        """states [B, T, D] -> [B, T], float32 at least."""
        logit = self.gate(states).squeeze(-1)
        return torch.sigmoid(logit if logit.dtype == torch.float64 else logit.float())


class UniversalStack(Stack):
    """H^t = layers(H^{t-1} + P^t), t = 1 .. N, with the same layers at every t (Dehghani et al. 2019, section 2).

    The signal of position i at step t is P^t_i = PE(i) + PE(t) with the sinusoids PE of Vaswani et al. 2017, or a
    learned vector in place of PE(t) (tensor2tensor's default). It is added anew at every step.

    With ACT a token runs until its halting probabilities p_t = sigmoid(w (H^{t-1} + P^t) + b) are spent ([`Halting`]).
    With u_t = p_t before it halts, R when it does and 0 after, its output is sum_t u_t H^t (`accumulated`: Graves), or
    O <- u_t H^t + (1 - u_t) O (`overwrite`: the code in the Universal Transformer's appendix). A token that still runs
    at the last step halts there; overwriting, it keeps u_t = p_t. Other tokens keep reading a halted token: its state
    stays as it was (`copy`), under the signal of the step at which it is read, or is transformed further
    (`keep_updating`, as in tensor2tensor). Nothing depends on the rest of the batch. Padding has halted before the
    first step. The ponder loss is tau times the mean of N + R over real tokens; N has no gradient.

    With `groups` the steps are divided into that many consecutive groups, of which each has layers of its own: step t
    runs those of group floor((t - 1) groups / N), from 0 (Lan et al. 2020, arXiv 1909.11942; the released code).

    When every token has halted the loop ends, unless later steps leave a trace of their own (cache slots, recorded
    states, a graph that is being traced): their output is the same.
    """

    def __init__(self, config, spec: UniversalSpec):
        super().__init__()
        self.spec = spec
        self.steps = config.num_hidden_layers // spec.layers_per_step
        self.halting = Halting(config, spec) if spec.act != "none" else None
        self.step_table = nn.Embedding(self.steps, config.hidden_size) if spec.step_signal == "learned" else None

    def group(self, step: int) -> int:
        """The group, from 0, of step 1, 2, ...; with the released code's rounding."""
        return int((step - 1) / (self.steps / self.spec.groups))

    def position_signal(self, positions: Tensor, like: Tensor) -> Tensor | None:
        """positions [B or 1, T] -> PE(i), [B or 1, T, D], in the dtype of `like`."""
        if not self.spec.position_signal:
            return None
        return sinusoids(positions, like.shape[-1], 10000.0, "interleaved").to(like.dtype)

    def step_signal(self, step: int, like: Tensor) -> Tensor | None:
        """The signal of step 1, 2, ... -> [D]."""
        if self.step_table is not None:
            return weight_of(self.step_table)[step - 1]
        if self.spec.step_signal == "none":
            return None
        index = torch.full((), step, device=like.device)
        return sinusoids(index, like.shape[-1], 10000.0, "interleaved").to(like.dtype)

    def forward(self, run: Pass) -> StackOutput:
        context = run.context
        each = self.spec.layers_per_step
        run.begin(self.steps * each)
        hidden_states = run.hidden_states
        real = context.query_padding_mask if context.unpadding is None else None
        placed = self.position_signal(run.positions, hidden_states)
        ledger = None if self.halting is None else _Ledger(hidden_states, real, self.spec)
        recorded = context.output_attentions or context.output_hidden_states
        may_stop = run.past_key_values is None and not recorded and can_inspect()
        for step in range(1, self.steps + 1):
            if ledger is not None and may_stop and step > 1 and not bool(ledger.running.any()):
                break
            state = hidden_states
            for signal in (placed, self.step_signal(step, state)):
                state = state if signal is None else state + signal
            if ledger is not None and self.halting is not None:
                ledger.spend(self.halting.probability(state), last=step == self.steps)
            first, run.hidden_states = each * self.group(step), state
            for index, layer in enumerate(run.layers[first : first + each]):
                run.step((step - 1) * each + index, layer)
            if ledger is None:
                hidden_states = run.hidden_states
            else:
                hidden_states = ledger.enter(hidden_states, run.hidden_states)
        if ledger is not None:
            hidden_states = ledger.output
            add_losses(run.losses, {"ponder": self.spec.act_loss_weight * ledger.ponder()})
        return StackOutput(context.padded(hidden_states), context, run.losses)


class _Ledger:
    """What each token has spent, during one forward call. All fields are [B, T] but `output` [B, T, D]."""

    def __init__(self, like: Tensor, real: Tensor | None, spec: UniversalSpec):
        wide = like.dtype if like.dtype == torch.float64 else torch.float32
        self.spec = spec
        self.real = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if real is None else real
        self.running = self.real  # before the step: who has not halted
        self.spent = torch.zeros(like.shape[:2], dtype=wide, device=like.device)  # sum of p before halting
        self.steps = torch.zeros_like(self.spent)
        self.remainder = torch.zeros_like(self.spent)
        self.weight = torch.zeros_like(self.spent)  # u of this step
        self.output = torch.zeros_like(like)
        self.before = self.running

    def spend(self, probability: Tensor, last: bool) -> None:
        """Decides with the halting probabilities [B, T] of this step who halts at it, and everybody's weight."""
        self.before = self.running
        exhausted = self.spent + probability > 1 - self.spec.act_epsilon
        halting = self.before if last else self.before & exhausted
        left = 1 - self.spent
        paid_in_full = halting if self.spec.act == "accumulated" else halting & exhausted
        zero = torch.zeros_like(probability)
        self.weight = torch.where(paid_in_full, left, torch.where(self.before, probability, zero))
        self.remainder = self.remainder + torch.where(halting, left, zero)
        self.steps = self.steps + self.before.to(self.steps.dtype)
        self.running = self.before & ~halting
        self.spent = self.spent + torch.where(self.running, probability, zero)

    def enter(self, before: Tensor, after: Tensor) -> Tensor:
        """States before and after this step's layers [B, T, D] -> the state of the next step."""
        weight = self.weight.to(after.dtype).unsqueeze(-1)
        kept = self.output if self.spec.act == "accumulated" else (1 - weight) * self.output
        self.output = kept + weight * after
        if self.spec.halted_state == "keep_updating":
            return after
        return torch.where(self.before.unsqueeze(-1), after, before)

    def ponder(self) -> Tensor:
        """Mean over real tokens of the number of steps plus the remainder (Graves 2016, section 2.1)."""
        count = self.real.sum().clamp(min=1)
        return (self.steps + self.remainder).sum() / count


@register("stack", "universal")
class UniversalSpec(StackSpec):
    """One layer (or a few), run again and again. `num_hidden_layers` counts the runs, which are the cache slots.

    Args:
        layers_per_step: layers that form one step (tensor2tensor: `num_inrecurrence_layers`); divides
            `num_hidden_layers`.
        groups: consecutive groups of steps with layers of their own (ALBERT: `num_hidden_groups`), at most one for
            each step.
        step_signal, position_signal: what is added before every step.
        act: `none` (all tokens take every step), or how a token's output is made of its states; `num_hidden_layers /
            layers_per_step` steps are then the most it can take.
        act_epsilon: what may remain of a token's probability when it halts.
        act_halting_bias_init: b at the start (1: p = 0.73).
        act_loss_weight: tau, the factor on the ponder loss.
        halted_state: what others read of a token that has halted.
    """

    supports = frozenset({"packed_rows", "unpadding"})
    summary = "one layer at every depth, with per-token halting"

    layers_per_step: int = bounded(1, least=1)
    groups: int = bounded(1, least=1)
    step_signal: Literal["sinusoid", "learned", "none"] = "sinusoid"
    position_signal: bool = True
    act: Literal["none", "accumulated", "overwrite"] = "none"
    act_epsilon: float = bounded(0.01, above=0, below=1)
    act_halting_bias_init: float | int = 1.0
    act_loss_weight: float | int = bounded(0.01, least=0)
    halted_state: Literal["copy", "keep_updating"] = "copy"

    def check(self, config) -> None:
        if config.num_hidden_layers % self.layers_per_step:
            raise ValueError(
                f"universal runs {self.layers_per_step} layers per step, which does not divide `num_hidden_layers` "
                f"{config.num_hidden_layers}; change one of them."
            )
        if self.groups * self.layers_per_step > config.num_hidden_layers:
            raise ValueError(
                f"universal has `groups={self.groups}`, of {self.layers_per_step} layers each, for"
                f" {config.num_hidden_layers // self.layers_per_step} steps; a group needs a step at least."
            )
        if config.hidden_size % 2 and (self.position_signal or self.step_signal == "sinusoid"):
            raise ValueError(
                f"universal's sinusoidal signals need an even `hidden_size`, got {config.hidden_size}; change it, or"
                " set `position_signal=False` and another `step_signal`."
            )

    def num_layers(self, config) -> int:
        return self.groups * self.layers_per_step

    def build(self, config, **where) -> UniversalStack:
        if config.is_heterogeneous:
            raise ValueError(
                "universal shares its layers over depth, so single layers cannot differ; leave out `per_layer_config`."
            )
        return UniversalStack(config, self)
