# SPDX-License-Identifier: Apache-2.0
"""DeBERTa's enhanced mask decoder: absolute positions enter right before masked tokens are predicted."""

from __future__ import annotations

import copy

from ..attention.shared.base import KeyStates
from ..core.call import add_losses, can_inspect
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import one_state
from .base import StackSpec
from .driver import Pass, StackOutput
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

    def forward(self, run: Pass) -> StackOutput:
        context, layers = run.context, run.layers
        table = context.inputs.get(ABSOLUTE_POSITIONS)
        if table is None:
            return super().forward(run)
        longest = run.hidden_states.shape[1]  # with padding, which has no position of its own
        if (longest > table.shape[0] or context.position_ids is not None) and can_inspect():
            longest = int(context.positions.max()) + 1
        if longest > table.shape[0]:
            raise ValueError(
                f"The sequence has {longest} tokens, but the enhanced mask decoder knows"
                f" {table.shape[0]} absolute positions (`max_position_embeddings`); shorten it or build a model with"
                " more."
            )
        run.layers = layers[:-1]
        result = super().forward(run)
        below, step = result.hidden_states, len(layers) - 1
        last = layers[-1]
        last.prepare(context, run.past_key_values)
        below = run.position.embed_layer(below, context.positions, step)  # in rows, as the stream with it is read
        given_states = {**context.states, **one_state(KeyStates(below))}
        quiet = copy.copy(context)  # the passes before the last are no layers of their own to whoever records
        quiet.output_attentions, quiet.implementation = False, "sdpa"
        states = context.packed(below + table[context.positions].to(below.dtype))
        for number in range(self.passes):
            final = number == self.passes - 1
            states, _, losses = (last if final else last.unrecorded)(
                states,
                None,
                given_states,
                context=context if final else quiet,
                step=step,
                past_key_values=run.past_key_values,
            )
        add_losses(result.aux_losses, losses)
        if run.collect is not None:
            run.collect(states)
        return StackOutput(context.padded(states), context, result.aux_losses)


@register("stack", "enhanced_mask_decoder")
class EnhancedMaskDecoderSpec(StackSpec):
    """passes: runs of the last layer (the released code: 2)."""

    layers_apart = False  # it runs the last layer's parts itself
    supports = frozenset({"packed_rows", "unpadding"})
    summary = "the last layer reads once more with absolute positions before masked tokens are predicted"
    inputs = (ABSOLUTE_POSITIONS,)

    passes: int = bounded(2, least=1)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "stack 'enhanced_mask_decoder' predicts masked tokens and cannot stand in a decoder; use 'plain'"
                " there."
            )
        if HandOver.KEY_STATES not in config.attention.reads or not config.position.acts & {
            "score_terms",
            "head_terms",
        }:
            raise ValueError(
                "stack 'enhanced_mask_decoder' needs attention 'dense' with a position inside it such as 'deberta',"
                f" got {config.attention.type!r} with {config.position.type!r}; use the stack 'plain'."
            )
        if not config.residual.enters_as_is:
            raise ValueError(
                "stack 'enhanced_mask_decoder' reads a layer's input as it is, got residual"
                f" {config.residual.type!r}; use 'post_ln'."
            )

    def build(self, config, **where) -> EnhancedMaskDecoder:
        return EnhancedMaskDecoder(self)
