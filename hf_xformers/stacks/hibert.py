# SPDX-License-Identifier: Apache-2.0
"""HIBERT's stack: a sentence encoder, and a document encoder over the sentences' vectors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..blocks.nesting import Levels, make_nesting
from ..core.call import add_losses
from ..core.components import bounded, register
from ..core.pooling import TextPooler
from ..core.reading_weights import weight_of
from .base import StackSpec
from .driver import Pass, StackOutput
from .nested import at_places, check_outer_position, last_words, nesting_of
from .plain import PlainStack


class DocumentPooler(TextPooler):
    """tanh(W mean_i d_i + b): the mean of the sentences' vectors, which stand at each sentence's last word."""

    inputs: ClassVar[tuple[str, ...]] = ("sentence_ids",)

    def __init__(self, config):
        super().__init__()
        self.width = config.stack.segment_length
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, sentence_ids: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, D]."""
        nesting = make_nesting(hidden_states, padding_mask, sentence_ids, self.width)
        vectors = at_places(nesting.nest(hidden_states), last_words(nesting)).unflatten(0, nesting.words.shape[:2])
        filled = nesting.filled.unsqueeze(-1)
        wide = vectors if vectors.dtype == torch.float64 else vectors.float()
        mean = wide.masked_fill(~filled, 0.0).sum(1) / filled.sum(1).clamp(min=1)
        return torch.tanh(self.dense(mean.to(vectors.dtype)))


class HibertStack(PlainStack):
    """Zhang, Wei and Zhou 2019 (arXiv 1905.06566), section 3.1. With w_i1 .. w_in the words of sentence i, the last of
    which ends it (EOS):

    h_i1 .. h_in = SentenceEncoder(w_i1 + p_1, ..., w_in + p_n)
    d_1 .. d_S = DocumentEncoder(h_1n + q_1, ..., h_Sn + q_S)

    d_i [B, S, D] is what the state of the sentence's last word is in the output [B, T, D], which is all that the paper
    reads: its labels of sentences stand there. The other words, for heads over words, have h_ij + d_i. A sentence
    without words takes no part. Cost O(T W D + S^2 D) besides projections.
    """

    def __init__(self, config, spec: HibertSpec):
        super().__init__()
        self.spec, self.document_layers = spec, spec.layers_over_sentences(config)
        self.word_table = nn.Embedding(spec.segment_length, config.hidden_size)
        self.sentence_table = nn.Embedding(spec.max_sentences or config.max_position_embeddings, config.hidden_size)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        width, length = self.spec.segment_length, hidden_states.shape[1]
        nesting = nesting_of(
            hidden_states, context, width, self.sentence_table.weight.shape[0], name="hibert", part="sentence"
        )
        place = context.query_index % width if nesting.slot is None else nesting.slot % width
        hidden_states = hidden_states + self.word_table(place)
        levels = Levels.of(context, nesting, run.position, hidden_states)
        lower = len(run.layers) - self.document_layers
        output = super().forward(run.within(nesting.nest(hidden_states), levels.words, run.layers[:lower]))
        words, losses = output.hidden_states, dict(output.aux_losses)
        last = last_words(nesting)
        vectors = at_places(words, last).unflatten(0, nesting.words.shape[:2])
        vectors = vectors + weight_of(self.sentence_table)[: nesting.sentences]
        output = super().forward(run.within(vectors, levels.document, run.layers[lower:]))
        add_losses(losses, output.aux_losses)
        documents = output.hidden_states.flatten(0, 1).unsqueeze(1)
        ends = (torch.arange(width, device=last.device) == last.unsqueeze(-1)).unsqueeze(-1)
        words = torch.where(ends, documents, words + documents)
        return StackOutput(nesting.flatten(words, length), context, losses)


@register("stack", "hibert")
class HibertSpec(StackSpec):
    """A sentence encoder below, a document encoder over sentences' vectors above.

    segment_length: words of a sentence at most, its end included; longer ones are cut in two. document_layers: how
    many of the layers, the last ones, are the document encoder (`None`: half of them). max_sentences: sentences of a
    text at most (`None`: `max_position_embeddings`).
    """

    shares = "nothing"
    keeps_tokens = False

    summary = "a sentence encoder, and a document encoder over sentence vectors"
    inputs = ("sentence_ids",)

    segment_length: int = bounded(50, least=1)
    document_layers: int | None = bounded(None, least=1)
    max_sentences: int | None = bounded(None, least=1)

    def layers_over_sentences(self, config) -> int:
        """Layers of the document encoder."""
        return config.num_hidden_layers // 2 if self.document_layers is None else self.document_layers

    def check(self, config) -> None:
        check_outer_position(config, "hibert")
        if self.document_layers is not None and self.document_layers >= config.num_hidden_layers:
            raise ValueError(
                f"stack 'hibert' with `document_layers` {self.document_layers} leaves none of the"
                f" {config.num_hidden_layers} layers to the sentence encoder; take fewer, or a larger"
                " `num_hidden_layers`."
            )

    def build_pooler(self, config) -> DocumentPooler:
        return DocumentPooler(config)

    def build(self, config, **where) -> HibertStack:
        if config.is_decoder:
            raise ValueError(
                "stack 'hibert' reads a text as a whole and cannot stand in a decoder; use it in an encoder, and in an"
                " encoder-decoder give `decoder={'stack': 'plain'}`."
            )
        return HibertStack(config, self)
