# SPDX-License-Identifier: Apache-2.0
"""DeBERTa's enhanced mask decoder: absolute positions enter right before masked tokens are predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from ..attention.shared.base import KEY_STATES
from ..blocks.base import XFormerLayer, unpack_layer
from ..core.components import bounded, register
from ..core.context import LayerContext, add_losses
from ..position.base import PositionActs
from .base import StackOutput, StackSpec
from .plain import PlainStack

ABSOLUTE_POSITIONS = "absolute_positions"


class EnhancedMaskDecoder(PlainStack):
    """The last layer runs `passes` times: first it reads with H + P, then with what it gave, always from H, the states
    of the layer below (He et al. 2021, section 3.2; the released code's two passes with shared weights).

    P [positions, D] comes from the masked language model, as the input `absolute_positions`; without it this is the
    plain stack, which is what other heads are trained on.
    """

    def __init__(self, spec: EnhancedMaskDecoderSpec):
        super().__init__()
        self.passes = spec.passes

    def forward(
        self,
        layers: Sequence[XFormerLayer],
        hidden_states: Tensor,
        context: LayerContext,
        *,
        position: PositionActs,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        collect: Callable[[Tensor], None] | None = None,
    ) -> StackOutput:
        table = context.inputs.get(ABSOLUTE_POSITIONS)
        given: dict[str, Any] = {
            "position": position,
            "memory": memory,
            "past_key_values": past_key_values,
            "collect": collect,
        }
        if table is None or not len(layers):
            return super().forward(layers, hidden_states, context, **given)
        if hidden_states.shape[1] > table.shape[0]:
            raise ValueError(
                f"The sequence has {hidden_states.shape[1]} tokens, but the enhanced mask decoder knows"
                f" {table.shape[0]} absolute positions (`max_position_embeddings`); shorten it or build a model with"
                " more."
            )
        result = super().forward(layers[:-1], hidden_states, context, **given)
        below, step = result.hidden_states, len(layers) - 1
        last: Any = layers[-1]
        last.prepare(context, past_key_values)
        below = position.embed_layer(below, context.positions, step)  # in rows, as the stream with it is read
        streams = {**context.streams, KEY_STATES: below}
        quiet = copy.copy(context)  # the passes before the last are no layers of their own to whoever records
        quiet.output_attentions, quiet.implementation = False, "sdpa"
        states = context.packed(below + table[context.positions].to(below.dtype))
        for number in range(self.passes):
            final = number == self.passes - 1
            output = (last if final else last.forward)(
                states,
                None,
                *streams.values(),
                context=context if final else quiet,
                step=step,
                stream_names=tuple(streams),
                past_key_values=past_key_values,
            )
            states, _, losses = unpack_layer(output)
        add_losses(result.aux_losses, losses)
        if collect is not None:
            collect(states)
        return StackOutput(context.padded(states), context, result.aux_losses)


@register("stack", "enhanced_mask_decoder")
class EnhancedMaskDecoderSpec(StackSpec):
    """passes: runs of the last layer (the released code: 2)."""

    layers_apart = False  # it runs the last layer's parts itself
    packed = True
    unpads = True
    summary = "the last layer reads once more with absolute positions before masked tokens are predicted"
    inputs = (ABSOLUTE_POSITIONS,)

    passes: int = bounded(2, least=1)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "stack 'enhanced_mask_decoder' predicts masked tokens and cannot stand in a decoder; use 'plain'"
                " there."
            )
        if not config.attention.apart_key_states or not config.position.acts & {"score_terms", "head_terms"}:
            raise ValueError(
                "stack 'enhanced_mask_decoder' needs attention 'dense' with a position inside it such as 'deberta',"
                f" got {config.attention.type!r} with {config.position.type!r}; use the stack 'plain'."
            )
        if not config.residual.enters_as_is:
            raise ValueError(
                "stack 'enhanced_mask_decoder' reads a layer's input as it is, for residual 'post_ln', got "
                f"{config.residual.type!r}."
            )

    def build(self, config, **where) -> EnhancedMaskDecoder:
        return EnhancedMaskDecoder(self)
