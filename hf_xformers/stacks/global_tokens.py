# SPDX-License-Identifier: Apache-2.0
"""Learned global tokens next to the text (the external nodes of ETC and BigBird-ETC)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.segment_memory import take_slots
from ..ops.common.real_tokens import real_first
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class GlobalTokensStack(PlainStack):
    """n learned vectors g_1 .. g_n join every text, pass all layers, and are cut off after the last one.

    They stand behind the text's last real token (padding is moved behind them and back after, so that it changes no
    distance), at position 0, and are global: the model input `global_attention_mask` is set for them, so
    that they see and are seen by all in attention that knows global tokens (longformer; bigbird with
    `global_mode="etc"`), Zaheer et al. 2020 (arXiv 2007.14062), section 2. In dense attention they are just further
    tokens. Recorded states and weights of single layers include them.
    """

    def __init__(self, config, spec: GlobalTokensSpec):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(spec.num_global_tokens, config.hidden_size))
        self.most_in_text = config.layer(0).attention.max_global_tokens

    def initialize(self, config, init) -> None:
        init.normal_(self.tokens, mean=0.0, std=config.initializer_range)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        batch, length = hidden_states.shape[:2]
        if context.explicit_mask is not None:
            raise ValueError(
                "global_tokens adds tokens to a text, which a prepared 4-D mask has no place for; give a [batch,"
                " length] mask."
            )
        own = self.tokens.to(hidden_states.dtype).expand(batch, -1, -1)
        hidden_states = torch.cat([hidden_states, own], dim=1)
        wider = self._context(context, batch, own.shape[1])
        order = None
        if wider.padding_mask is not None:
            order = real_first(wider.padding_mask)
            hidden_states = take_slots(hidden_states, order)
            wider = self._ordered(wider, order)
        run.position.share(wider, hidden_states)
        run.hidden_states, run.context, run.past_key_values = hidden_states, wider, None
        result = super().forward(run)
        hidden_states = result.hidden_states
        if order is not None:
            hidden_states = take_slots(hidden_states, order.argsort(1))
        return StackOutput(hidden_states[:, :length], context, result.aux_losses)

    @staticmethod
    def _ordered(context: Call, order: Tensor) -> Call:
        """The context of the same tokens in the order [B, T] of slots."""
        chosen = context.inputs["global_attention_mask"].gather(1, order)
        return context.derive(
            padding_mask=None if context.padding_mask is None else context.padding_mask.gather(1, order),
            positions=context.positions.expand(order.shape[0], -1).gather(1, order),
            inputs={**context.inputs, "global_attention_mask": chosen},
        )

    def _context(self, context: Call, batch: int, count: int) -> Call:
        """The context of texts with `count` more tokens."""
        length, device = context.query_index.shape[0], context.query_index.device
        mask, given = context.padding_mask, context.inputs.get("global_attention_mask")
        if mask is not None:  # in a row of padding alone they are padding too
            mask = torch.cat([mask, mask.any(-1, keepdim=True).expand(-1, count)], dim=1)
        chosen = torch.zeros(batch, length, dtype=torch.bool, device=device) if given is None else given > 0
        chosen = torch.cat([chosen, chosen.new_ones(batch, count)], dim=1)
        inputs = {**context.inputs, "global_attention_mask": chosen}
        most = 0 if given is None else context.inputs.get("max_global_tokens", self.most_in_text)
        if most is not None:  # a bound on the text's own, which these join
            inputs["max_global_tokens"] = most + count
        index = torch.arange(length + count, device=device)
        return context.derive(
            padding_mask=mask,
            positions=nn.functional.pad(context.positions, (0, count)),
            query_index=index,
            key_index=index,
            inputs=inputs,
        )


@register("stack", "global_tokens")
class GlobalTokensSpec(StackSpec):
    """num_global_tokens: learned tokens that join every text."""

    keeps_tokens = False

    summary = "learned global tokens pass through all layers next to the text"
    inputs = ("global_attention_mask",)

    num_global_tokens: int = bounded(256, "global_tokens", least=1)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "The stack 'global_tokens' reads the whole text and cannot stand in a decoder; use 'plain' there, e.g."
                " `decoder={'stack': 'plain'}` in an encoder-decoder."
            )
        if not config.attention.takes_global_tokens():
            raise ValueError(
                f"The stack 'global_tokens' needs attention that takes global tokens, which {config.attention.type!r}"
                " as it is set does not; use 'longformer', {'type': 'bigbird', 'global_mode': 'etc'} or 'dense'."
            )

    def build(self, config, **where) -> GlobalTokensStack:
        return GlobalTokensStack(config, self)
