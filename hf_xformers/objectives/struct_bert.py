# SPDX-License-Identifier: Apache-2.0
"""Word and sentence structure (Wang W. et al. 2020, StructBERT, arXiv 1908.04577, sections 2.2 and 2.3).

Tokens that are masked, the order of shuffled trigrams, and whether a text comes after another one, before it, or is
of elsewhere.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, Row, pad_rows, register
from .masked_lm import MaskedLMCollator, MaskedLMObjective, MaskNoise, apply_noise, sample_noise
from .sentence_pairs import SentencePairCollator, SentencePairObjective, _chance, _integer


def sample_shuffle(
    blocked: Tensor, selected: Tensor, objective: StructBertObjective, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(starts [S], permutations [S, K]) of the spans that are shuffled in a row.

    blocked [n] bool: special tokens, which no span holds; selected [n] bool: targets of the masked LM, neither. The
    number is `shuffle_ratio` of all spans of the text, rounded up or down at random so that the mean is exact: of
    spans side by side (`disjoint`, from a random first one in every stretch of text) or of all starts (`all`). A
    permutation may be the identity.
    """
    size = objective.shuffle_span
    starts: list[int] = []
    if objective.spans == "all":
        free = (~blocked).float().unfold(0, size, 1).sum(-1) == size if len(blocked) >= size else blocked[:0]
        starts = free.nonzero().squeeze(1).tolist()
    else:
        edges = torch.nn.functional.pad((~blocked).int(), (1, 1)).diff()
        for begin, end in zip((edges == 1).nonzero().squeeze(1).tolist(), (edges == -1).nonzero().squeeze(1).tolist()):
            spare = min((end - begin) % size, size - 1) if end - begin >= size else 0
            starts += range(begin + _integer(0, spare, generator), end - size + 1, size)
    count = int(objective.shuffle_ratio * len(starts) + _chance(generator))
    taken = selected.clone()
    chosen: list[int] = []
    for index in torch.randperm(len(starts), generator=generator).tolist():
        if len(chosen) == count:
            break
        span = slice(starts[index], starts[index] + size)
        if not bool(taken[span].any()):
            taken[span] = True
            chosen.append(starts[index])
    orders = [torch.randperm(size, generator=generator) for _ in chosen]
    return torch.tensor(chosen, dtype=torch.int64), torch.stack(orders) if orders else torch.zeros(0, size).long()


def apply_shuffle(ids: Tensor, starts: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [n] with the spans in their new order, which positions [n] are in one): at place i of a span stands what
    stood at place order[i]. Positions stay where they are.

    Raises ValueError for spans that overlap.
    """
    inside = torch.zeros_like(ids, dtype=torch.bool)
    if not len(starts):
        return ids, inside
    places = starts[:, None] + torch.arange(orders.shape[1])
    if len(places.unique()) < places.numel():
        raise ValueError(f"spans of {orders.shape[1]} tokens at {starts.tolist()} overlap: give spans that do not")
    shuffled = ids.clone()
    shuffled[places] = ids[starts[:, None] + orders]
    inside[places] = True
    return shuffled, inside


class ShufflingCollator(MaskedLMCollator):
    """Batches as for masked LM, with shuffled spans whose tokens are targets, too."""

    structure: StructBertObjective

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        inputs, labels = map(list, zip(*(self.corrupted(row) for row in rows)))
        shape = batch["input_ids"].shape[1], self.padding_side
        batch["input_ids"] = pad_rows(inputs, self.pad_token_id, *shape)
        batch["labels"] = pad_rows(labels, IGNORE_INDEX, *shape)
        return batch

    def corrupted(self, row: Row) -> tuple[Tensor, Tensor]:
        """(input_ids, labels) of a row without padding."""
        special = self.special_tokens(row)
        generator = self.generator(row.ids)
        noise: MaskNoise = sample_noise(special, self.objective, self.vocabulary, generator, self.units(row))
        inputs, labels = apply_noise(row.ids, noise, self.mask_token_id)
        starts, orders = sample_shuffle(special, noise.selected, self.structure, generator)
        inputs, inside = apply_shuffle(inputs, starts, orders)
        return inputs, torch.where(inside, row.ids, labels)


class StructBertCollator(SentencePairCollator):
    """Batches with `input_ids`, `attention_mask`, `token_type_ids`, `labels` [B, T] and `next_sentence_label` [B]."""

    objective: StructBertObjective

    def __init__(self, objective: StructBertObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        masking = ShufflingCollator(objective.mlm or MaskedLMObjective(), tokenizer, **settings)
        masking.structure, masking._epoch = objective, self._epoch
        self.masking = masking


@register("struct_bert")
class StructBertObjective(SentencePairObjective):
    """Predict masked tokens and the tokens of shuffled spans, and what the second text of a pair is: the next one
    (label 0), one of another document (1) or the one before (2), a third each.

    Args:
        shuffle_ratio: share of the spans without a masked token that are shuffled.
        shuffle_span: tokens of a span.
        spans: which ones there are: side by side (`disjoint`), or at every token (`all`; three times as many).
        sentence_classes: 3; 2 leaves out the one before, as in BERT.
        max_seq_length: longest row with its three special tokens; `pretrain` takes no more than its --block_size.
        short_seq_prob: how often a document is cut in rows of a random shorter length (at least 2 tokens).
        mlm: settings of the masked LM.
        dupe_factor: how often the documents are gone through, each time cut in other pairs.

    A chunk of one sentence is left out, for it has no second half (with two classes its second text is of elsewhere).
    """

    mlm: MaskedLMObjective | None = MaskedLMObjective()
    shuffle_ratio: float | int = bounded(0.05, least=0, most=1)
    shuffle_span: int = bounded(3, least=2)
    spans: Literal["disjoint", "all"] = "disjoint"
    sentence_classes: Literal[2, 3] = 3

    summary: ClassVar[str] = "masked tokens, shuffled trigrams and the order of two texts (StructBERT)"
    corrupts: ClassVar[str] = "15 % of the tokens, 5 % of the trigrams, two thirds of the pairs"
    head: ClassVar[str] = "PreTraining"
    collates = StructBertCollator
    replaces_second: ClassVar[bool] = True

    def check_fields(self) -> None:
        self._require(self.mlm is not None, "mlm must be the settings of a masked LM, which this objective includes")

    def config_fields(self) -> dict[str, Any]:
        return {"pretraining": {"sentence_pairs": {"classes": self.sentence_classes}}}

    def sample_second(self, sentences: int, generator: torch.Generator) -> int | None:
        if self.sentence_classes == 2:
            return 1 if sentences == 1 else int(_chance(generator) < 0.5)
        return None if sentences == 1 else _integer(0, 2, generator)
