# SPDX-License-Identifier: Apache-2.0
"""The Axial Transformer's decoder: whole rows above, and the tokens before in the same row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.cache import RecurrentStateLayer, SlotStateLayer
from ..core.call import Call, add_losses, can_inspect, self_attention_cache
from ..core.components import register
from ..core.hand_overs import HandOver
from ..ops.common.padding import row_spans
from ..position.base import key_positions
from .base import StackSpec
from .driver import Pass, StackOutput, memory_by_step
from .plain import PlainStack


class AxialStack(PlainStack):
    """Ho et al. 2019 (arXiv 1912.12180), section 3.2. With x the embedded tokens of a grid of C columns,

        u <- x;   u <- ColumnBlock_masked(RowBlock_unmasked(u)), N_outer / 2 times
        h <- x + down(u);   h <- RowBlock_masked(h), N_inner times

    where down moves every row to the next one and puts zeros into the first. A token then depends on all rows above it
    (u) and on its own row up to itself (h). The paper moves x to the right before the inner layers, so that an output
    predicts the token at its own place; here an output predicts the next token, as in every decoder, and x stays.

    In an encoder the layers run one after the other.

    State: the embedded tokens, u of finished rows, and the inner layers' keys and values. The outer layers run once
    for each row that is finished, over all rows (fast sampling, section 3.3); in each step where layers' states or
    weights are recorded, which for outer layers are those of all tokens so far.
    """

    def __init__(self, config, spec: AxialStackSpec):
        super().__init__()
        self.outer = spec.outer_layers(config)
        self.columns = config.layer(0).attention.columns_in(config.layer(0)) if self.outer else 0

    def forward(self, run: Pass) -> StackOutput:
        if not self.outer:
            return super().forward(run)
        layers, context = run.layers, run.context
        if context.explicit_mask is not None:
            raise ValueError(
                "stack 'axial_transformer' finds the rows of a text by its padding and takes no 4-D mask; give a"
                " [batch, length] mask of real tokens."
            )
        memories = memory_by_step(run.memory, len(layers))
        hidden_states = run.hidden_states + self._above(run, memories)
        for layer in layers[self.outer :]:
            layer.prepare(context, run.past_key_values)
        for step in range(self.outer, len(layers)):
            hidden_states = self._layer(run, hidden_states, context, memories, step, run.past_key_values)
        return StackOutput(hidden_states, context, run.losses)

    @staticmethod
    def _layer(
        run: Pass,
        states: Tensor,
        context: Call,
        memories: Sequence[Tensor | None],
        step: int,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        states = run.position.embed_layer(states, context.positions, step)
        given = {"context": context, "step": step, "past_key_values": past_key_values}
        states, _, found = run.layers[step](states, memories[step], context.states, **given)
        add_losses(run.losses, found)
        return states

    def _above(self, run: Pass, memories: Sequence[Tensor | None]) -> Tensor:
        """down(u) for the current tokens, [B, T, D]."""
        new, context = run.hidden_states, run.context
        held = self._state(run.past_key_values)
        known = held[0].state if held else {}
        tokens = torch.cat([known["embedded"], new], dim=1) if known else new
        told = {
            name: x for name, x in context.inputs.items() if isinstance(x, Tensor) and x.shape[:2] == new.shape[:2]
        }
        if known:
            told = {name: torch.cat([known[name], x], dim=1) for name, x in told.items()}
        batch, total = tokens.shape[:2]
        real = context.padding_mask
        lead = new.new_zeros(1, dtype=torch.long) if real is None else row_spans(real)[0]
        finished = ((total - lead) // self.columns).expand(batch)
        recorded = context.output_hidden_states or context.output_attentions
        if known and not recorded and can_inspect() and torch.equal(finished, known["finished"]):
            rows = F.pad(known["rows"], (0, 0, 0, total - known["rows"].shape[1]))
        else:
            rows = self._outer(run, tokens, told, memories)
        for layer in held:
            layer.advance(new.shape[1])
        if held:
            held[0].advance(0, embedded=tokens, rows=rows, finished=finished, **told)
        moved = F.pad(rows, (0, 0, self.columns, 0))[:, context.query_index]
        inside = context.query_index[None] - lead[:, None] >= self.columns
        return moved.masked_fill(~inside[..., None], 0.0)

    def _state(self, past_key_values: Cache | None) -> list[RecurrentStateLayer]:
        cache = self_attention_cache(past_key_values)
        if cache is None:
            return []
        held = [layer for layer in cache.layers[: self.outer] if isinstance(layer, RecurrentStateLayer)]
        if len(held) < self.outer:
            raise ValueError(
                f"stack 'axial_transformer' keeps finished rows, which the given {type(cache).__name__} has no place"
                " for; leave `past_key_values` out, or make it with `hf_xformers.core.cache.make_cache(config)`."
            )
        return held

    def _outer(self, run: Pass, tokens: Tensor, told: dict[str, Tensor], memories: Sequence[Tensor | None]) -> Tensor:
        """u of all tokens [B, S, D] so far, of which `told` are the inputs by token; of a row that is not finished it
        means nothing."""
        context, index = run.context, torch.arange(tokens.shape[1], device=tokens.device)
        views = []
        for causal in (False, True):
            view = context.derive(
                positions=key_positions(context),
                query_index=index,
                key_index=index,
                causal=causal,
                fresh=True,
                inputs_embeds=tokens,
                position_ids=None,
                inputs={**context.inputs, **told},
            )
            run.position.share(view, tokens)
            for layer in run.layers[causal : self.outer : 2]:
                layer.prepare(view, None)
            views.append(view)
        states = tokens
        for step in range(self.outer):
            states = self._layer(run, states, views[step % 2], memories, step)
        return states if context.padding_mask is None else states.masked_fill(~context.padding_mask[..., None], 0.0)


@register("stack", "axial_transformer", aliases=("axial",))
class AxialStackSpec(StackSpec):
    """num_outer_layers: layers that read whole rows and masked columns by turns, an even number (`None`: half of the
    layers or one less); the others read the row of a token up to itself. In an encoder it has no effect."""

    gives = frozenset({HandOver.AXES})
    shares = "prepared"
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "its rows begin where the text does"}

    summary = "a decoder over a grid: whole rows above a token, and its own row up to itself"

    num_outer_layers: int | None = None

    def check_fields(self) -> None:
        count = self.num_outer_layers
        if count is not None and (count < 2 or count % 2):
            raise ValueError(
                f"axial_transformer needs an even `num_outer_layers` >= 2, a row and a column layer each, got {count}."
            )

    def check(self, config) -> None:
        if not config.is_decoder:
            return
        if HandOver.AXES not in config.attention.reads:
            raise ValueError(
                "stack 'axial_transformer' divides a decoder's layers into those of whole rows, of columns and of rows"
                f" up to a token, which attention {config.attention.type!r} does not have; use"
                " attention='axial_transformer'."
            )
        count = self.outer_layers(config)
        if not 2 <= count < config.num_hidden_layers:
            raise ValueError(
                f"stack 'axial_transformer' in a decoder needs two outer layers and an inner one at least, but there"
                f" are {count} outer ones of {config.num_hidden_layers} layers; raise the number of layers, or lower"
                " `num_outer_layers`."
            )

    def outer_layers(self, config) -> int:
        if not config.is_decoder:
            return 0
        if self.num_outer_layers is not None:
            return self.num_outer_layers
        return max(config.num_hidden_layers // 4 * 2, 2)

    def cache_layer(self, config, step: int) -> CacheLayerMixin | None:
        return SlotStateLayer() if step < self.outer_layers(config) else None

    def build(self, config, **where) -> AxialStack:
        return AxialStack(config, self)
