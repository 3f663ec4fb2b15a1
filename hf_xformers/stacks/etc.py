# SPDX-License-Identifier: Apache-2.0
"""ETC's two streams: a text, and global tokens that stand for its parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..blocks.nesting import check_sentence_ids
from ..core.call import Call, can_inspect
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.segment_memory import take_slots
from ..ops.common.real_tokens import real_places, real_together
from ..position.etc_relative import TwoStreams
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class EtcStack(PlainStack):
    """The text's tokens, and one global token for each of its parts, pass through all layers; the global ones are cut
    off after the last (Ainslie et al. 2020, arXiv 2004.08483, section 2.1).

    Parts are `tokens_per_global` tokens long, or end where the model input `sentence_ids` changes. All global tokens
    start as the same learned vector; their last states are the output's `summaries`. They stand behind the text, whose
    tokens stay where they are (padding behind it is moved behind them, and back after), and are marked in
    `global_attention_mask`; which token each stands for is the `TwoStreams` of the call, which position `etc_relative`
    reads.
    """

    def __init__(self, config, spec: EtcStackSpec):
        super().__init__()
        self.size = spec.tokens_per_global
        self.token = nn.Parameter(torch.empty(config.hidden_size))

    def initialize(self, config, init) -> None:
        init.normal_(self.token, mean=0.0, std=config.initializer_range)

    def parts(self, context: Call, batch: int) -> tuple[Tensor, int]:
        """The number of each token's part [B or 1, T] (of padding any), and how many there are at most."""
        length, device = context.query_index.shape[0], context.query_index.device
        real, ids = context.padding_mask, context.inputs.get("sentence_ids")
        check_sentence_ids(ids, batch, length)
        place = context.query_index[None] if real is None else real_places(real)
        if ids is None:
            return place // self.size, -(-length // self.size)
        mask = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
        last = torch.where(mask, context.query_index, -1).cummax(-1).values
        before = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
        starts = mask & ((ids != ids.gather(1, before.clamp(min=0))) | (place == 0))
        number = (starts.long().cumsum(-1) - 1).clamp(min=0)
        return number, int(number.max()) + 1 if can_inspect() and length else max(length, 1)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        if context.explicit_mask is not None:
            raise ValueError(
                "stack 'etc' adds tokens to a text, which a prepared 4-D mask has no place for; give a [batch, length]"
                " mask."
            )
        batch, length = hidden_states.shape[:2]
        device = hidden_states.device
        part, count = self.parts(context, batch)
        own = self.token.to(hidden_states.dtype).expand(batch, count, -1)
        states = torch.cat([hidden_states, own], dim=1)
        number = torch.arange(count, device=device)
        rows = part.shape[0]
        is_global = torch.arange(length + count, device=device)[None] >= length
        place = torch.cat([(context.query_index[None]).expand(rows, -1), number.expand(rows, -1)], dim=1)
        summary = torch.cat([part, number.expand(rows, -1)], dim=1)
        real, order = context.padding_mask, None
        if real is not None or context.inputs.get("sentence_ids") is not None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
            used = torch.where(mask, part + 1, 0).amax(-1, keepdim=True)
            mask = torch.cat([mask, number < used], dim=1)
            order = real_together(mask)
            states, mask = take_slots(states, order), mask.gather(1, order)
            is_global, place, summary = (x.expand(batch, -1).gather(1, order) for x in (is_global, place, summary))
            real = mask
        positions = torch.cat([context.positions, number.expand(context.positions.shape[0], -1)], dim=1)
        index = torch.arange(length + count, device=device)
        chosen, given = is_global.expand(batch, -1), context.inputs.get("global_attention_mask")
        if given is not None:  # tokens of the text that the caller wants to be global, too
            own = nn.functional.pad(given > 0, (0, count))
            chosen = chosen | (own if order is None else own.gather(1, order))
        inputs = {**context.inputs, "global_attention_mask": chosen}
        most = 0 if given is None else inputs.get("max_global_tokens")
        if most is not None:  # a bound on the text's own, which these join
            inputs["max_global_tokens"] = most + count
        wider = context.derive(
            padding_mask=real,
            positions=positions if order is None else positions.expand(batch, -1).gather(1, order),
            query_index=index,
            key_index=index,
            inputs=inputs,
        )
        wider.keep(TwoStreams(is_global, place, summary))
        run.position.share(wider, states)
        run.hidden_states, run.context, run.past_key_values = states, wider, None
        result = super().forward(run)
        states = result.hidden_states
        if order is not None:
            states = take_slots(states, order.argsort(1))
        return StackOutput(states[:, :length], context, result.aux_losses, summaries=states[:, length:])


@register("stack", "etc")
class EtcStackSpec(StackSpec):
    """tokens_per_global: tokens that a global token stands for, where no `sentence_ids` say so (27: a sentence
    of the paper's data in the mean)."""

    keeps_tokens = False
    gives = frozenset({HandOver.SUMMARIES})

    summary = "global tokens that stand for parts of the text pass through all layers next to it"
    inputs = ("sentence_ids",)

    tokens_per_global: int = bounded(27, least=1)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "The stack 'etc' reads the whole text and cannot stand in a decoder; use 'plain' there, e.g."
                " `decoder={'stack': 'plain'}` in an encoder-decoder."
            )
        if not config.attention.takes_global_tokens() or config.attention.max_global_tokens is not None:
            raise ValueError(
                f"The stack 'etc' needs attention that takes any number of global tokens, which"
                f" {config.attention.type!r} as it is set does not; use 'etc'."
            )

    def build(self, config, **where) -> EtcStack:
        return EtcStack(config, self)
