# SPDX-License-Identifier: Apache-2.0
"""FLOATER: positions as the path of a learned differential equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core.call import Call
from ..core.components import bounded, register
from ..core.linear_maps import is_plain_linear
from ..core.precision import Float32Module
from ..core.prepared import State
from ..core.reading_weights import weight_of
from ..ops.common.products import widened
from .base import Position, PositionSpec, PositionTables, PositionTerms


class FloaterBiases(State):
    """The biases of all layers, [positions, 3, layers, D]."""

    rows: Tensor


SEGMENT = 32  # positions whose solver steps are computed again together in the backward pass

Dynamics = Callable[[float, Tensor], Tensor]  # (time, state) -> slope


def solver_step(dynamics: Dynamics, state: Tensor, time: float, width: float, solver: str) -> Tensor:
    """The state after one step of size `width` from `time` by a classical Runge-Kutta method: `euler` (error of order
    1), `midpoint` (2) or `rk4` (4)."""
    slope = dynamics(time, state)
    if solver == "euler":
        return torch.add(state, slope, alpha=width)
    middle = dynamics(time + width / 2, torch.add(state, slope, alpha=width / 2))
    if solver == "midpoint":
        return torch.add(state, middle, alpha=width)
    again = dynamics(time + width / 2, torch.add(state, middle, alpha=width / 2))
    last = dynamics(time + width, torch.add(state, again, alpha=width))
    return torch.add(state, slope + 2 * middle + 2 * again + last, alpha=width / 6)


def trajectory(
    dynamics: Dynamics, start: Tensor, length: int, delta: float, substeps: int, solver: str, first: int = 0
) -> Tensor:
    """States at the times (first + i) * delta, i = 0 .. length - 1, from `start` [...] at the first: [length, ...]."""
    state, states = start, [start]
    width = delta / substeps
    for number in range((length - 1) * substeps):
        state = solver_step(dynamics, state, (first * substeps + number) * width, width, solver)
        if number % substeps == substeps - 1:
            states.append(state)
    return torch.stack(states)


class FloaterDynamics(Float32Module):
    """f(t, p) = W2 [relu(W1 [p, t]), t], shared by all layers and by queries, keys and values (released code).

    Without time, f(p) = W2 relu(W1 p): what leads from one state to the next is the same wherever in a text it is.
    """

    def __init__(self, width: int, timed: bool = True):
        super().__init__()
        self.timed = timed
        self.first, self.second = nn.Linear(width + timed, width), nn.Linear(width + timed, width)

    def initialize(self, config, init) -> None:
        for layer in (self.first, self.second):
            init.xavier_normal_(layer.weight)
            init.zeros_(layer.bias)

    @property
    def is_plain(self) -> bool:
        """Whether the parameters are all that f depends on: no adapters, which can be switched off, and no hooks."""
        return is_plain_linear(self.first) and is_plain_linear(self.second)

    def called(self, time: float, state: Tensor) -> Tensor:
        """f of its modules as they are called."""
        times = (state.new_full((*state.shape[:-1], 1), time),) if self.timed else ()
        inner = torch.relu(self.first(torch.cat((state, *times), dim=-1)))
        return self.second(torch.cat((inner, *times), dim=-1))

    def slope(self) -> Dynamics:
        """f as a function of (time, state [..., D]), in float32 at least: errors of single steps add up along the
        text. A step is a few small operations, of which there are many, so the weights are taken apart once and not in
        every step, where there is no more to them than that."""
        if not self.is_plain:
            return self.called
        first, second = widened(self.first.weight, self.second.weight)
        first_bias, second_bias = widened(self.first.bias, self.second.bias)
        if not self.timed:
            return lambda time, state: F.linear(F.linear(state, first, first_bias).relu(), second, second_bias)
        (first, first_time), (second, second_time) = ((weight[:, :-1], weight[:, -1]) for weight in (first, second))

        def f(time: float, state: Tensor) -> Tensor:
            inner = torch.relu(F.linear(state, first, torch.add(first_bias, first_time, alpha=time)))
            return F.linear(inner, second, torch.add(second_bias, second_time, alpha=time))

        return f


class FloaterPosition(Float32Module, Position):
    """The path from p(0) [3, layers, D], one start for the queries, keys and values of each layer.

    The equation is solved once per call for the longest text, whatever the batch and the number of layers; step
    follows step, so this takes time in proportion to the length. While nothing learns, the solution is kept, with a
    copy of the parameters that it belongs to. Parameters and states are in float32 at least.
    """

    readers = ("biases",)

    def __init__(self, config, spec: FloaterSpec):
        super().__init__()
        self.spec = spec
        self.dynamics = FloaterDynamics(config.hidden_size, timed=not spec.translation_invariant)
        self.start = nn.Parameter(torch.empty(3, config.num_hidden_layers, config.hidden_size))
        self._kept: tuple[list[Tensor], Tensor] | None = None

    def initialize(self, config, init) -> None:
        init.normal_(self.start, mean=0.0, std=self.spec.start_std)

    def shared_tables(self) -> FloaterPosition:
        return self

    def biases(self, length: int, trusted: bool = False) -> Tensor:
        """[length, 3, layers, D]; trusted: what was kept is known to be that of these parameters."""
        plain = isinstance(self.dynamics, FloaterDynamics) and self.dynamics.is_plain  # no wrapper of peft's
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not plain:
            return self._solve(length)
        now = [parameter.detach() for parameter in self.parameters()]
        if self._kept is None or self._kept[1].shape[0] < length or not (trusted or _same(self._kept[0], now)):
            self._kept = [parameter.clone() for parameter in now], self._solve(max(length, 2 * SEGMENT))
        return self._kept[1][:length]

    def _solve(self, length: int) -> Tensor:
        start = weight_of(self, "start")
        with torch.autocast(start.device.type, enabled=False):
            return self._solve_precisely(start, length)

    def _solve_precisely(self, start: Tensor, length: int) -> Tensor:
        spec, pieces, (state,) = self.spec, [], widened(start)

        def piece(state: Tensor, first: int, count: int) -> Tensor:
            return trajectory(self.dynamics.slope(), state, count, spec.delta, spec.substeps, spec.solver, first)

        for first in range(0, length, SEGMENT):
            count = min(SEGMENT, length - first)
            more = int(first + count < length)  # the next segment starts where this one ends
            if torch.is_grad_enabled() and length > SEGMENT:
                states = checkpoint(piece, state, first, count + more, use_reentrant=False)
            else:
                states = piece(state, first, count + more)
            pieces.append(states[:count])
            state = states[-1]
        return torch.cat(pieces)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they hold the same numbers. Versions of tensors would not tell: writes through `.data` count for none of
    them."""
    pairs = list(zip(some, others, strict=True))
    alike = all(a.dtype == b.dtype and a.device == b.device and a.shape == b.shape for a, b in pairs)
    return alike and all(torch.equal(a, b) for a, b in pairs)


class FloaterTerms(PositionTerms):
    """q_i += b^Q(t_i), k_j += b^K(t_j), v_j += b^V(t_j) after the projections; t_i = i * delta."""

    changes_scores = False

    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx

    def prepare(self, context: Call) -> None:
        if context.state(FloaterBiases) is not None:
            return
        length = context.key_index.shape[0]
        # Where looking waits for the device, a step of decoding goes by what the beginning of its text has found.
        trusted = not context.fresh and context.key_index.device.type != "cpu"
        if context.position_ids is not None and not torch.compiler.is_compiling() and not trusted:
            length = max(length, int(context.positions.max()) + 1)  # the caller's own positions may lie beyond
        context.start(FloaterBiases(context.prepared(PositionTables).module.biases(length, trusted)))

    def heads(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor, Tensor]:
        rows = context.given(FloaterBiases).rows[:, :, self.layer_idx][context.positions]  # [B or 1, T, 3, D]
        rows = rows.unflatten(-1, (query.shape[1], -1)).permute(2, 0, 3, 1, 4).to(query.dtype)
        return query + rows[0], key + rows[1], value + rows[2]


@register("position", "floater")
class FloaterSpec(PositionSpec):
    """Liu, Yu, Dhillon and Hsieh 2020 (arXiv 2003.09229), sections 3.1 and 3.2, with the released encoder's dynamics.
    In cross-attention nothing is added.

    Args:
        delta: time between two tokens.
        substeps: solver steps per token.
        solver: `euler`, `midpoint` or `rk4`.
        start_std: standard deviation that p(0) starts with.
        translation_invariant: the slope is a function of the state alone, f(p): a text that begins later on the path
            than another continues as this one does.
    """

    summary = "the path of a learned differential equation added to queries, keys and values of every layer"
    acts = frozenset({"head_terms"})
    shares_tables = True

    delta: float = bounded(0.01, above=0)
    substeps: int = bounded(5, above=0)
    solver: Literal["euler", "midpoint", "rk4"] = "midpoint"
    start_std: float | int = bounded(1.0, above=0)
    translation_invariant: bool = False

    def check(self, config) -> None:
        width = config.num_attention_heads * config.head_width
        if width != config.hidden_size or config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"floater has one state of `hidden_size` {config.hidden_size} for queries, keys and values each, but"
                f" heads make {width} and {config.key_value_heads * config.head_width}; leave `head_dim` and"
                " `num_key_value_heads` at None."
            )

    def build(self, config, **where) -> FloaterPosition:
        return FloaterPosition(config, self)

    def build_terms(self, config, layer_idx: int) -> FloaterTerms:
        return FloaterTerms(layer_idx)
