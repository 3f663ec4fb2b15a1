# SPDX-License-Identifier: Apache-2.0
"""HierSumm's stack: several texts, or the paragraphs of one, as rows of words."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks.hiersumm import Paragraphs
from ..blocks.nesting import Levels, Nesting
from ..core.call import Call
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..position.sinusoidal_absolute import sinusoids
from .base import StackSpec
from .driver import Pass, StackOutput
from .nested import check_outer_position, nesting_of
from .plain import PlainStack


class HierSummStack(PlainStack):
    """Liu and Lapata 2019 (arXiv 1905.13164), section 3.2: word i of paragraph p starts as

    x + [sin/cos(i) ; sin/cos(p)], each half the width,

    and the layers work on the paragraphs, [B * P, W, D] (see `blocks/hiersumm.py`). The output is [B, T, D] again:
    the words of all paragraphs in their order, which is what a decoder reads. Paragraphs are as long as
    `segment_length`, or end where `sentence_ids` change. Cost O(T W D + P^2 D) besides projections.
    """

    def __init__(self, spec: HierSummSpec):
        super().__init__()
        self.spec = spec

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        length, width = hidden_states.shape[1], self.spec.segment_length
        most = self.spec.max_sentences or max(length, 1)
        nesting = nesting_of(hidden_states, context, width, most, name="hiersumm", part="paragraph")
        slot = context.query_index[None] if nesting.slot is None else nesting.slot
        places = [sinusoids(index, hidden_states.shape[-1] // 2, 10000.0, "half") for index in
                  (slot % width, slot.div(width, rounding_mode="floor"))]  # fmt: skip
        hidden_states = hidden_states + torch.cat(places, dim=-1).to(hidden_states.dtype)
        words = Levels.of(context, nesting, run.position, hidden_states).words
        words.keep(Paragraphs(nesting, self._graph(context, nesting)))
        output = super().forward(run.within(nesting.nest(hidden_states), words))
        return StackOutput(nesting.flatten(output.hidden_states, length), context, output.aux_losses)

    @staticmethod
    def _graph(context: Call, nesting: Nesting) -> Tensor | None:
        """The weights of the paragraphs' graph. Raises ValueError for one of other paragraphs."""
        graph = context.inputs.get("paragraph_graph")
        wanted = (nesting.words.shape[0], nesting.sentences, nesting.sentences)
        if graph is not None and graph.shape != wanted:
            raise ValueError(
                f"`paragraph_graph` {list(graph.shape)} is not of the {nesting.sentences} paragraphs of this batch;"
                f" give weights {list(wanted)}, for the paragraphs that `sentence_ids` tell apart."
            )
        return graph


@register("stack", "hiersumm")
class HierSummSpec(StackSpec):
    """Paragraphs and what they say to each other; needs block 'hiersumm', whose last layers do that.

    segment_length: words of a paragraph at most; longer ones are cut in two. max_sentences: paragraphs at most (the
    paper's setting is 24; `None`: no limit).
    """

    shares = "prepared"
    keeps_tokens = False
    gives = frozenset({HandOver.PARAGRAPHS})

    summary = "several texts, or paragraphs, as rows of words, for layers that read both levels"
    inputs = ("sentence_ids", "paragraph_graph")

    segment_length: int = bounded(100, least=1)
    max_sentences: int | None = bounded(None, least=1)

    def check(self, config) -> None:
        check_outer_position(config, "hiersumm")
        if config.hidden_size % 4:
            raise ValueError(
                f"stack 'hiersumm' has sinusoids of words and of paragraphs, half the width each, and needs a"
                f" `hidden_size` that is a multiple of 4, got {config.hidden_size}."
            )

    def build(self, config, **where) -> HierSummStack:
        if config.is_decoder:
            raise ValueError(
                "stack 'hiersumm' reads all paragraphs as a whole and cannot stand in a decoder; use it in an encoder,"
                " and in an encoder-decoder give `decoder={'stack': 'plain', 'block': 'vanilla'}`."
            )
        return HierSummStack(self)
