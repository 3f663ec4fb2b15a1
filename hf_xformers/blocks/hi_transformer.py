# SPDX-License-Identifier: Apache-2.0
"""Hi-Transformer's layer: words read their sentence, sentences their text, and words their sentence and the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput, add_losses
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import States
from ..core.weight_decay import Undecayed
from .base import BlockSpec, LayerOutput, SublayerPlan, XFormerLayer
from .nesting import AttentivePooling, Levels, SentencePositions


class HiLayer(Undecayed, XFormerLayer):
    """Wu et al. 2021 (arXiv 2106.01040), section 2. With h_i1 .. h_iW the words of sentence i, p_i its position:

    in the first layer   h_i  <- SentenceTransformer_1(h_i1, ..., h_iW)
    s_i = attentive pooling of h_i1 .. h_iW
    d_1 .. d_S = DocumentTransformer(s_1 + p_1, ..., s_S + p_S)
    [h_i ; _] <- SentenceTransformer_2(h_i1, ..., h_iW, d_i + u)

    Each Transformer is one attention and one feed-forward sublayer. u, which is learned, tells the text's vector from
    a word. A sentence without words takes no part. Cost O(T W D + S^2 D) besides projections.
    """

    undecayed = ("document_mark",)

    def __init__(self, config, block: BlockSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, block, layer_idx=layer_idx, cross=cross)
        self.first = layer_idx == 0
        self.pooling = AttentivePooling(config)
        self.document_mark = nn.Parameter(torch.zeros(config.hidden_size))

    def initialize(self, config, init) -> None:
        init.normal_(self.document_mark, mean=0.0, std=config.initializer_range)

    def at_level(
        self, prefix: str, hidden_states: Tensor, context: Call, losses: dict[str, Tensor], step: int
    ) -> Tensor:
        """Attention and feed-forward planned under `prefix`, on [R, N, D]."""
        plan = {entry.name: entry for entry in self.plan}
        context = context.passing({})
        for kind in ("attention", "feedforward"):
            entry = plan.get(prefix + kind) or plan[kind]  # shared sentence layers have no first ones
            frame = self.frame(entry)
            result: SublayerOutput = self.run_sublayer(entry, hidden_states, context, None, None, step)
            hidden_states = frame.leave(hidden_states, result.output, result.gate, **frame.inputs(context))
            add_losses(losses, result.aux_losses)
        return hidden_states

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        levels = context.prepared(Levels)
        for prefix, level in (("first_", levels.words), ("document_", levels.document), ("", levels.informed)):
            for entry in self.plan:
                if entry.name in (f"{prefix}attention", f"{prefix}feedforward"):
                    self.function(entry).prepare(level, None)
        if self.first and not any(entry.name == "first_attention" for entry in self.plan):
            for entry in self.plan:
                if entry.name in ("attention", "feedforward"):
                    self.function(entry).prepare(levels.words, None)

    def run(
        self,
        hidden_states: Tensor,
        memory: Tensor | None,
        states: States,
        *,
        context: Call,
        step: int,
        **_: Any,
    ) -> LayerOutput:
        levels = context.prepared(Levels)
        nesting, positions = levels.nesting, states[SentencePositions, None]
        losses: dict[str, Tensor] = {}
        batch, count = nesting.words.shape[:2]
        words = nesting.nest(hidden_states)
        if self.first:
            words = self.at_level("first_", words, levels.words, losses, step)
        sentences = self.pooling(words, nesting.words.flatten(0, 1)).view(batch, count, -1)
        sentences = self.at_level("document_", sentences + positions.rows, levels.document, losses, step)
        told = (sentences + self.document_mark).view(batch * count, 1, -1)
        words = self.at_level("", torch.cat([words, told], dim=1), levels.informed, losses, step)[:, :-1]
        hidden_states = nesting.flatten(words, hidden_states.shape[1])
        return LayerOutput(hidden_states, states, losses)


@register("block", "hi_transformer")
class HiTransformerBlockSpec(BlockSpec):
    """share_sentence_layers: in the first layer, the words' first Transformer is the second one."""

    passes_states: ClassVar[bool] = False
    reads: ClassVar[frozenset[HandOver]] = frozenset({HandOver.SENTENCES})
    supports = frozenset()
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "its sentences are rows"}

    summary = "sentence Transformer, document Transformer, sentence Transformer that reads the document"

    share_sentence_layers: bool = False

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        prefixes = ["document_", ""]
        if layer_idx == 0 and not self.share_sentence_layers:
            prefixes.insert(0, "first_")
        return [SublayerPlan(prefix + kind, kind) for prefix in prefixes for kind in ("attention", "feedforward")]

    def build(self, config, **where) -> HiLayer:
        return HiLayer(config, self, **where)
