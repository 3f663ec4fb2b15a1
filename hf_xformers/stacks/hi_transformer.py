# SPDX-License-Identifier: Apache-2.0
"""Hi-Transformer's stack: a text as sentences of words, so that layers can work at both levels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..blocks.nesting import AttentivePooling, Levels, SentencePositions, make_nesting
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.pooling import TextPooler
from ..core.reading_weights import weight_of
from .base import StackSpec
from .driver import Pass, StackOutput
from .nested import check_outer_position, nesting_of
from .plain import PlainStack


class HierarchicalPooler(TextPooler):
    """A text's vector: attentive pooling of words to sentences, and of sentences to the text."""

    inputs: ClassVar[tuple[str, ...]] = ("sentence_ids",)

    def __init__(self, config):
        super().__init__()
        self.width = config.stack.segment_length
        self.words, self.sentences = AttentivePooling(config), AttentivePooling(config)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, sentence_ids: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, D]."""
        nesting = make_nesting(hidden_states, padding_mask, sentence_ids, self.width)
        batch, count = nesting.words.shape[:2]
        vectors = self.words(nesting.nest(hidden_states), nesting.words.flatten(0, 1))
        return self.sentences(vectors.view(batch, count, -1), nesting.filled)


class HiStack(PlainStack):
    """Cuts the text into sentences, adds each word's place in its sentence, and runs the layers, which work on both
    levels (see `blocks/hi_transformer.py`). Sentences are as long as `segment_length`, or end where `sentence_ids`
    change."""

    def __init__(self, config, spec: HiTransformerSpec):
        super().__init__()
        self.spec = spec
        self.word_table = nn.Embedding(spec.segment_length, config.hidden_size)
        self.sentence_table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context, width = run.hidden_states, run.context, self.spec.segment_length
        most = self.sentence_table.weight.shape[0]
        nesting = nesting_of(
            hidden_states, context, width, most, "max_position_embeddings", name="hi_transformer", part="sentence"
        )
        if nesting.slot is None:
            place = context.query_index % width
        else:
            place = nesting.slot % width  # of padding as well, where it does not matter
        hidden_states = hidden_states + self.word_table(place)
        context.start(SentencePositions(weight_of(self.sentence_table)[None, : nesting.sentences]))
        context.keep(Levels.of(context, nesting, run.position, hidden_states))
        run.hidden_states = hidden_states
        return super().forward(run)


@register("stack", "hi_transformer")
class HiTransformerSpec(StackSpec):
    """Sentences and texts; needs block 'hi_transformer', whose layers work at both levels.

    segment_length: words of a sentence at most; longer ones are cut.
    """

    shares = "prepared"
    keeps_tokens = False
    gives = frozenset({HandOver.SENTENCES})

    summary = "a text as sentences of words, for layers that work at both levels"
    inputs = ("sentence_ids",)

    segment_length: int = bounded(32, least=1)

    def check(self, config) -> None:
        check_outer_position(config, "hi_transformer")

    def build_pooler(self, config) -> HierarchicalPooler:
        return HierarchicalPooler(config)

    def build(self, config, **where) -> HiStack:
        if config.is_decoder:
            raise ValueError(
                "stack 'hi_transformer' reads a text as a whole and cannot stand in a decoder; use it in an encoder,"
                " and in an encoder-decoder give `decoder={'stack': 'plain', 'block': 'vanilla'}`."
            )
        return HiStack(config, self)
