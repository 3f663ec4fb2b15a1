# SPDX-License-Identifier: Apache-2.0
"""The plain stack."""

from __future__ import annotations

from typing import Any

from ..blocks.base import flattened
from ..core.call import reads_pairs
from ..core.components import register
from ..core.hand_overs import HandOver
from .base import Stack, StackSpec
from .driver import Pass, StackOutput


class PlainStack(Stack):
    """Every layer once, in order.

    last_alone: the number of the layer from which on all read of earlier tokens what a layer below has passed on
    (`shared`, a `State`), and keep nothing themselves. Where states of the last tokens alone are wanted, as of a
    prompt, these layers are given them alone: the prefilling of YOCO (Sun et al. 2024, arXiv 2405.05254, section 2).
    None: there is no such layer.
    """

    def __init__(self, last_alone: int | None = None, shared: type | None = None):
        super().__init__()
        self.last_alone, self.shared = last_alone, shared

    def forward(self, run: Pass) -> StackOutput:
        run.begin()
        for step in range(len(run.layers)):
            if step == self.last_alone:
                self._shorten(run, step)
            run.step(step)
        return run.output()

    def _shorten(self, run: Pass, first: int) -> None:
        """Continues with the last tokens, where nothing is wanted of the others and nothing else was passed on."""
        context, count = run.context, run.context.logits_to_keep
        if not 0 < count < run.hidden_states.shape[1] or context.inputs or not context.causal:
            return
        if self.training or context.output_attentions or context.output_hidden_states or context.back_end:
            return
        if not reads_pairs(context.implementation):  # others make masks by the length of a cache
            return
        if any(x is not None for x in (context.parts, context.unpadding, context.segment_ids)):
            return
        made, now = (dict(zip(*flattened(states), strict=True)) for states in (context.states, run.states))
        passed = {key for (key, field), tensor in now.items() if tensor is not made.get((key, field))}
        if any(kind is not self.shared for kind, _ in passed):
            return
        last, mask = slice(-count, None), context.explicit_mask
        run.hidden_states, run.positions = run.hidden_states[:, last], context.positions[:, last]
        run.context = context.derive(
            positions=run.positions,
            query_index=context.query_index[last],
            fresh=False,
            explicit_mask=None if mask is None else mask[:, :, last],
            inputs_embeds=None,
            position_ids=None,
        )
        run.position.share(run.context, run.hidden_states)
        for layer in run.layers[first:]:
            layer.prepare(run.context, None)
        run.states = {**run.context.states, **{key: run.states[key] for key in passed}}


def _last_alone(config: Any) -> tuple[int | None, type | None]:
    """`last_alone` and `shared` of a [`PlainStack`]."""
    first, shared = None, None
    for index in reversed(range(config.num_hidden_layers)):
        layer = config.layer(index)
        carry = layer.attention.carries(layer)
        reads = carry is not None and carry.owner is not None and carry.owner(index) != index
        alone = layer.block.cache_layer(layer) is None and not layer.block.mixes
        if not (reads and alone and not layer.feedforward.expert_count() and shared in (None, carry.kind)):
            break
        first, shared = index, carry.kind
    return first, shared


@register("stack", "plain")
class PlainStackSpec(StackSpec):
    """Layers one after the other (Vaswani et al. 2017)."""

    supports = frozenset({"choices", "context_parallel", "layer_drop", "packed_rows", "unpadding"})
    gives = frozenset({HandOver.EARLIER_IDS})
    summary = "layers one after the other"

    def build(self, config, **where) -> PlainStack:
        return PlainStack(*_last_alone(config))
