# SPDX-License-Identifier: Apache-2.0
"""The stack of CA-MTL: states are aligned for their task, and leave through a bottleneck that knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from ..compat import shared_setting
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import one_state
from ..core.tasks import TASKS, TaskVector, check_one_text, task_numbers
from ..normalization.conditional_post_ln import TaskGain
from ..ops.common.products import widened
from .driver import Pass, StackOutput
from .plain import PlainStack, PlainStackSpec


class Alignment(nn.Module):
    """x' = x R(z), R(z)_ij = (1 + gamma_j(z)) R_ij + beta_j(z): one matrix for all tasks, whose columns the task
    modulates (section 2.2.2). R starts at the identity and the map from z at zero, so that nothing changes at first.

    R(z) is never made: x R(z) = (1 + gamma) * (x R) + beta * sum_i x_i.
    """

    def __init__(self, width: int):
        super().__init__()
        self.matrix = nn.Linear(width, width, bias=False)
        self.film = nn.Linear(width, 2 * width)

    def initialize(self, config, init) -> None:
        init.eye_(self.matrix.weight)
        init.zeros_(self.film.weight)
        init.zeros_(self.film.bias)

    def forward(self, vectors: Tensor, task: Tensor) -> Tensor:
        """vectors [B, T, D], task [B or 1, D] -> [B, T, D]."""
        factor, shift = self.film(task)[:, None].chunk(2, dim=-1)
        (wide,) = widened(vectors)
        total = wide.sum(-1, keepdim=True).to(vectors.dtype)
        return self.matrix(vectors) * (1 + factor) + total * shift


class ConditionalBottleneck(nn.Module):
    """y = CLN(x + Up(Down(FiLM(x; z))); z), FiLM(x; z) = (1 + gamma(z)) x + beta(z), without a nonlinearity (section
    2.2.4, released code)."""

    def __init__(self, width: int, inner: int, eps: float):
        super().__init__()
        self.film = nn.Linear(width, 2 * width)
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.gain = nn.LayerNorm(width, eps=eps), TaskGain(width, width, eps)

    def initialize(self, config, init) -> None:
        init.zeros_(self.film.weight)
        init.zeros_(self.film.bias)

    def forward(self, vectors: Tensor, task: Tensor) -> Tensor:
        """vectors [B, T, D], task [B or 1, D] -> [B, T, D]."""
        factor, shift = self.film(task)[:, None].chunk(2, dim=-1)
        inner = self.down(vectors * (1 + factor) + shift)
        return self.gain.after(self.norm, vectors + self.up(inner), task)


class TaskConditionedStack(PlainStack):
    """h_0 = x R(z), the layers one after the other, and [`ConditionalBottleneck`] on the last one's states.

    Pilault, Elhattami, Pal 2021 (arXiv 2009.09139), section 2.2. z = E_t W + b is the vector of task t (input `tasks`
    [B]). It is passed on as [`TaskVector`], which attention 'ca_mtl' and residual 'conditional_post_ln' read in the
    layers.
    """

    def __init__(self, config, spec: TaskConditionedSpec):
        super().__init__()
        width = config.hidden_size
        self.num_tasks = spec.num_tasks
        self.task_table, self.task_proj = nn.Embedding(spec.num_tasks, width), nn.Linear(width, width)
        self.alignment = Alignment(width) if spec.alignment else None
        inner = None if spec.reduction is None else max(1, int(width // spec.reduction))
        self.bottleneck = (
            None if inner is None else ConditionalBottleneck(width, inner, shared_setting(config, "layer_norm_eps"))
        )

    def forward(self, run: Pass) -> StackOutput:
        task = self.task_proj(self.task_table(task_numbers(run.context, self.num_tasks)))
        if self.alignment is not None:
            run.hidden_states = self.alignment(run.hidden_states, task)
        run.context = run.context.passing({**run.context.states, **one_state(TaskVector(task))})
        result = super().forward(run)
        if self.bottleneck is not None:
            result.hidden_states = self.bottleneck(result.hidden_states, task)
        return result


@register("stack", "ca_mtl", aliases=("task_conditioned",))
class TaskConditionedSpec(PlainStackSpec):
    """num_tasks: tasks with a vector each; of several, the model's input `tasks` [batch] says which. alignment:
    whether states pass a matrix that depends on the task before the first layer. reduction: how many times narrower
    than the states the bottleneck after the last layer is (`None`: there is none)."""

    summary = "layers one after the other, with matrices around them that know the task"
    inputs = (TASKS,)
    gives = PlainStackSpec.gives | {HandOver.TASK}
    supports = frozenset({"choices", "layer_drop", "packed_rows"})
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "each row has a task of its own"}

    num_tasks: int = bounded(1, least=1)
    alignment: bool = True
    reduction: float | int | None = bounded(3, least=1)

    def check(self, config) -> None:
        check_one_text(config, "stack 'ca_mtl'", self.num_tasks)
        if not config.block.passes_states:
            raise ValueError(
                f"stack 'ca_mtl' hands the task through all layers, which block {config.block.type!r} does not pass"
                " on; set `block='vanilla'`, or `stack='plain'`."
            )
        reads = self.alignment or self.reduction is not None or TASKS in config.attention.inputs
        if not reads and HandOver.TASK not in config.residual.reads:
            raise ValueError(
                "stack 'ca_mtl' without `alignment` and bottleneck makes a vector of the task that nothing reads; set"
                " `residual='conditional_post_ln'` or `attention='ca_mtl'`, or `stack='plain'`."
            )

    def build(self, config, **where) -> TaskConditionedStack:
        return TaskConditionedStack(config, self)
