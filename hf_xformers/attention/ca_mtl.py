# SPDX-License-Identifier: Apache-2.0
"""Conditional attention of CA-MTL: a bias on near tokens that depends on the task."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput, can_inspect
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import Carry, State, one_state
from ..core.tasks import TASKS, TaskVector, check_one_text, task_numbers
from ..ops.common.products import wide_products, widened
from ..position.base import key_positions
from .shared.block_scores import BlockScoresAttention, ScoreBlock
from .shared.spec import AttentionSpec


class ConditionalBlockAttention(BlockScoresAttention):
    """s_ij = scale * q_i k_j + M_ij, M_ij = (1 + gamma_(j mod w)(z)) W_(i, j mod w) + beta_(j mod w)(z) where i and j
    are in the same block of w positions, else 0.

    Pilault, Elhattami, Pal 2021 (arXiv 2009.09139), section 2.2, released code. The positions of a text are m blocks
    of w = ceil(L / m), L the longest text; W [L, w] is learned in each layer, and the task's vector z of the batch's
    rows modulates its columns (FiLM). All heads have the same M. z = E_t Wz + bz of task t (input `tasks` [B]) is made
    by the first layer, or by the stack 'ca_mtl', and is the stream `ca_mtl_task`. W and the map from z start at zero,
    so that a new model is one without M (the released code starts the map at random). Scores are not hidden where M is
    0: the name "block-diagonal" means the bias.

    Time that of vanilla attention; memory O(T), as scores are made for blocks of queries. State: keys and values.
    """

    unpads = True

    spec: ConditionalBlockSpec

    def __init__(self, config, spec: ConditionalBlockSpec, **where):
        super().__init__(config, spec, **where)
        self.block = spec.block(config)
        self.near = nn.Parameter(torch.empty(config.max_position_embeddings, self.block))
        self.film = nn.Linear(config.hidden_size, 2 * self.block)
        first = self.layer_idx == 0 and not _is_given(config)
        self.task_table = nn.Embedding(spec.num_tasks, config.hidden_size) if first else None
        self.task_proj = nn.Linear(config.hidden_size, config.hidden_size) if first else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for parameter in (self.near, self.film.weight, self.film.bias):
            init.zeros_(parameter)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        padding, longest, places = context.padding_mask, context.key_index.shape[0], self.near.shape[0]
        if longest <= places:
            return
        if padding is not None or context.static:
            if not can_inspect():
                return
            # Padding takes no place, and neither do slots that are empty yet.
            longest = int(context.positions.max()) + 1 if padding is None else int(padding.sum(-1).max())
        if longest > places:
            raise ValueError(
                f"The sequence has {longest} tokens, but ca_mtl's table has {places} places; shorten it, or build the"
                " model with a larger `max_position_embeddings`."
            )

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        task = self._task(context)
        factor, shift = widened(*self.film(task).chunk(2, dim=-1))
        seen = context.passing({**context.states, **one_state(Film(1 + factor, shift))})
        result = super().forward(hidden_states, seen, memory=memory, past_key_values=past_key_values, step=step)
        return result._replace(states=one_state(TaskVector(task)))

    def _task(self, context: Call) -> Tensor:
        """z [B or 1, D]."""
        handed = context.state(TaskVector)
        if handed is not None:
            return handed.vector
        if self.task_table is None or self.task_proj is None:
            raise ValueError(
                f"ca_mtl layer {self.layer_idx} was handed no task, which layer 0 makes; make layer 0 ca_mtl, too."
            )
        return self.task_proj(self.task_table(task_numbers(context, self.spec.num_tasks)))

    def tables(self) -> tuple[Tensor, ...]:
        return (self.near[None, None],)

    def scores(self, query: Tensor, key: Tensor, block: ScoreBlock) -> Tensor:
        products = wide_products(query * self.scaling, self.repeated(key)[:, block.heads])
        return products + self._bias(block).to(products.dtype)

    def _bias(self, block: ScoreBlock) -> Tensor:
        """M of the block's queries and keys, [B or 1, 1, t, s]."""
        context = block.context
        asking, answering = context.positions[:, block.rows], key_positions(context)[:, block.keys]
        column = answering % self.block
        (near,) = widened(block.tables[0].take_at(asking.clamp(max=self.near.shape[0] - 1)))  # [B or 1, t, w]
        film = context.given(Film)
        bias = near * film.factor[:, None] + film.shift[:, None]  # [B or 1, t, w]
        column = column[:, None].expand(bias.shape[0] if column.shape[0] == 1 else -1, asking.shape[1], -1)
        bias = bias.expand(column.shape[0], -1, -1).gather(-1, column)
        same = asking[:, :, None] // self.block == answering[:, None] // self.block
        return torch.where(same, bias, 0.0)[:, None]


def _is_given(config) -> bool:
    """Whether the stack makes the vector of the task."""
    return HandOver.TASK in config.stack.gives


class Film(State):
    """What a task makes of the table of near places: a factor and a shift, [B or 1, w] each."""

    factor: Tensor
    shift: Tensor


@register("attention", "ca_mtl")
class ConditionalBlockSpec(AttentionSpec):
    """num_tasks: tasks with a vector each; of several, the model's input `tasks` [batch] says which (the stack
    'ca_mtl' has them in its place). num_blocks: m, blocks that the longest text is cut into (`None`: as many whole
    longest texts as go into `hidden_size`, at least one, as in the released code)."""

    summary = "a bias on tokens of the same block, which depends on the task"
    inputs: ClassVar[tuple[str, ...]] = (TASKS,)
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})
    head_options = frozenset({"blocks", "norm", "parts"})
    keeps_keys_alone = True

    num_tasks: int = bounded(1, least=1)
    num_blocks: int | None = bounded(None, least=1)

    def block(self, config) -> int:
        """w, positions of a block."""
        longest = config.max_position_embeddings
        count = max(config.hidden_size // longest, 1) if self.num_blocks is None else self.num_blocks
        return -(-longest // count)

    def places(self, config) -> int:
        return config.max_position_embeddings

    def carries(self, config) -> Carry | None:
        return None if _is_given(config) else Carry(TaskVector, (self.num_tasks,), of_first=True, handed_on=True)

    def check(self, config) -> None:
        longest = config.max_position_embeddings
        if self.num_blocks is not None and self.num_blocks > longest:
            raise ValueError(f"ca_mtl needs `num_blocks` of at most {longest}, the positions, got {self.num_blocks}.")
        if _is_given(config) and self.num_tasks not in (1, config.stack.num_tasks):
            raise ValueError(
                f"attention 'ca_mtl' is for {self.num_tasks} tasks, and the stack, which tells it the task, for"
                f" {config.stack.num_tasks}; leave `num_tasks` of the attention out."
            )
        check_one_text(config, "attention 'ca_mtl'", self.num_tasks)

    def build(self, config, **where) -> ConditionalBlockAttention:
        return ConditionalBlockAttention(config, self, **where)
