# SPDX-License-Identifier: Apache-2.0
"""Next sentence prediction (Devlin et al. 2019, 3.1 task 2) and sentence order prediction (Lan et al. 2020, 3.1).

`sentence_pairs` turns documents cut in sentences into rows [CLS] A [SEP] B [SEP] with a label; the collator pads them
and, if asked, masks tokens for a masked LM besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core.components import bounded
from .base import Collator, Objective, build_objective, keyed_generator, read_row, register
from .masked_lm import MaskedLMObjective, merge_words

if TYPE_CHECKING:
    from datasets import Dataset

LABEL = "next_sentence_label"


@dataclass(frozen=True)
class Segment:
    """Sentences start..stop-1 of a document, without `front` tokens at the beginning and `back` at the end."""

    document: int
    start: int
    stop: int
    front: int = 0
    back: int = 0


@dataclass(frozen=True)
class PairPlan:
    """A row before it is written: its two segments and the label: 0 as in the text; 1 random second, or swapped where
    the objective has no random ones; 2 swapped where it has."""

    a: Segment
    b: Segment
    label: int


def _chance(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    """Uniform in low..high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def sample_noise(
    document: int,
    lengths: Callable[[int], Sequence[int]],
    num_documents: int,
    objective: SentencePairObjective,
    generator: torch.Generator,
) -> list[PairPlan]:
    """Plan the rows of one document; `lengths(d)` gives the token counts of the sentences of document d.

    Sentences fill a chunk up to the target length; the chunk is cut at a random sentence boundary. Every row holds at
    least one token of A and of B and at most max_seq_length - 3 of both.
    """
    own = lengths(document)
    limit = objective.max_seq_length - 3
    target = limit
    if _chance(generator) < objective.short_seq_prob:
        target = _integer(2, limit, generator)
    plans = []
    start = position = filled = 0
    while position < len(own):
        filled += own[position]
        position += 1
        if position < len(own) and filled < target:
            continue
        count = position - start
        middle = start + (_integer(1, count - 1, generator) if count > 1 else 1)
        first, second = Segment(document, start, middle), Segment(document, middle, position)
        label, other = objective.sample_second(count, generator), None
        if label == 1 and objective.replaces_second:  # the other labels keep both segments
            other = _random_segment(document, target - sum(own[start:middle]), lengths, num_documents, generator)
            position = middle  # the sentences that were not used begin the next chunk
        if label is not None:
            first, second = _truncate(first, other or second, lengths, limit, generator)
            swap = label == (2 if objective.replaces_second else 1)
            plans.append(PairPlan(second, first, label) if swap else PairPlan(first, second, label))
        start, filled = position, 0
    return plans


def _random_segment(
    document: int, wanted: int, lengths: Callable[[int], Sequence[int]], num_documents: int, generator: torch.Generator
) -> Segment:
    """Sentences with at least `wanted` tokens, if there are as many, from a random place of another document."""
    other = _integer(0, num_documents - 2, generator)
    other += other >= document
    theirs = lengths(other)
    start = _integer(0, len(theirs) - 1, generator)
    stop, filled = start + 1, theirs[start]
    while stop < len(theirs) and filled < wanted:
        filled += theirs[stop]
        stop += 1
    return Segment(other, start, stop)


def _truncate(
    a: Segment, b: Segment, lengths: Callable[[int], Sequence[int]], limit: int, generator: torch.Generator
) -> tuple[Segment, Segment]:
    """Take tokens one by one from the longer segment, at either end with equal chance, until both fit in `limit`."""
    sizes = [sum(lengths(segment.document)[segment.start : segment.stop]) for segment in (a, b)]
    excess = max(0, sum(sizes) - limit)
    cuts = [[0, 0], [0, 0]]  # front and back of a, of b
    for end in (torch.rand(excess, generator=generator) < 0.5).tolist():
        longer = 0 if sizes[0] > sizes[1] else 1
        sizes[longer] -= 1
        cuts[longer][end] += 1
    return Segment(a.document, a.start, a.stop, *cuts[0]), Segment(b.document, b.start, b.stop, *cuts[1])


def apply_noise(
    plan: PairPlan, sentences: Callable[[int], Sequence[Sequence[int]]], cls_token_id: int, sep_token_id: int
) -> dict[str, Any]:
    """The row of a plan: `input_ids`, `token_type_ids` (0 for [CLS] A [SEP], 1 for B [SEP]), mask of specials, label.

    `sentences(d)` gives the sentences of document d as lists of ids.
    """
    a, b = _tokens(plan.a, sentences), _tokens(plan.b, sentences)
    return {
        "input_ids": [cls_token_id, *a, sep_token_id, *b, sep_token_id],
        "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1),
        "special_tokens_mask": [1, *[0] * len(a), 1, *[0] * len(b), 1],
        LABEL: plan.label,
    }


def _tokens(segment: Segment, sentences: Callable[[int], Sequence[Sequence[int]]]) -> list[int]:
    tokens = [token for sentence in sentences(segment.document)[segment.start : segment.stop] for token in sentence]
    return tokens[segment.front : len(tokens) - segment.back]


def sentence_pairs(
    documents: Dataset,
    tokenizer: Any,
    objective: SentencePairObjective,
    *,
    seed: int = 0,
    epoch: int = 0,
    column: str = "sentences",
    num_proc: int | None = None,
) -> Dataset:
    """A dataset of sentence pairs from a dataset of documents.

    `documents` has in `column` the sentences of one document per row, as texts or as lists of ids. The result has
    `input_ids`, `token_type_ids`, `special_tokens_mask`, `next_sentence_label` and, from texts with a fast tokenizer,
    `unit_ids` for whole-word masking. It depends on (seed, epoch) and the documents, not on `num_proc`; another epoch
    gives other pairs of the same text, and so does every further pass of `objective.dupe_factor`. Raises ValueError if
    the tokenizer has no cls or sep token, if B is to come from another document and there are fewer than two, or if no
    pair, or none of two consecutive texts, comes out.
    """
    from datasets import concatenate_datasets

    for name in ("cls", "sep"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no {name} token for the row [CLS] A [SEP] B [SEP]: add it with"
                f" load_tokenizer(..., add_missing=[{name!r}])"
            )
    if column not in documents.column_names:
        raise ValueError(f"the documents have no column {column!r}, only {documents.column_names}: name the right one")
    documents = documents.map(
        partial(_tokenize, tokenizer=tokenizer, column=column),
        remove_columns=documents.column_names,
        num_proc=num_proc,
    ).filter(_has_text, num_proc=num_proc)
    if objective.replaces_second and len(documents) < 2:
        raise ValueError(
            f"next sentence prediction draws B from another document, and there is {len(documents)}: give at least 2"
            " (blank lines divide a text file into documents with sample_by='paragraph')"
        )
    shared = {"documents": documents, "tokenizer": tokenizer, "objective": objective, "seed": seed}
    passes = [
        documents.map(
            partial(_pair_rows, **shared, epoch=objective.dupe_factor * epoch + number),
            with_indices=True,
            batched=True,
            batch_size=1,
            remove_columns=documents.column_names,
            num_proc=num_proc,
        )
        for number in range(objective.dupe_factor)
    ]
    pairs = concatenate_datasets(passes) if len(passes) > 1 else passes[0]
    longest = max((len(ids) for ids in documents["ids"]), default=0)
    if not len(pairs) or longest < 2:
        raise ValueError(
            f"no document gives a pair of texts that follow each other: the longest of {len(documents)} has"
            f" {longest} sentence{'s' if longest != 1 else ''} (ends at . ! ? before a capital letter, or an empty"
            " line); give documents of several sentences"
            if longest < 2
            else "no document gives a pair: cut the documents in shorter sentences, or raise max_seq_length "
            f"(now {objective.max_seq_length})"
        )
    return pairs


def _tokenize(row: Mapping[str, Any], tokenizer: Any, column: str) -> dict[str, list[list[int]]]:
    sentences = [sentence for sentence in row[column] if len(sentence)]
    if not sentences or not isinstance(sentences[0], str):
        return {"ids": [list(sentence) for sentence in sentences], "units": []}
    encoding = tokenizer(sentences, add_special_tokens=False, verbose=False)  # sentences may be longer than rows
    keep = [index for index, ids in enumerate(encoding["input_ids"]) if len(ids)]
    units: list[list[int]] = []
    if encoding.is_fast:
        found, offset = [merge_words(item.word_ids, item.sequence_ids) for item in encoding.encodings], 0
        for index in keep:
            # Counted on through the document, or the last word of a sentence could run into the first of the next.
            units.append([unit if unit < 0 else unit + offset for unit in found[index]])
            offset += max(found[index]) + 1
    return {"ids": [encoding["input_ids"][index] for index in keep], "units": units}


def _has_text(row: Mapping[str, Any]) -> bool:
    return len(row["ids"]) > 0


def _pair_rows(
    batch: Mapping[str, Any],
    indices: Sequence[int],
    documents: Dataset,
    tokenizer: Any,
    objective: SentencePairObjective,
    seed: int,
    epoch: int,
) -> dict[str, list[Any]]:
    (index,) = indices
    known = {index: {name: batch[name][0] for name in ("ids", "units")}}  # documents read so far

    def document(number: int) -> Mapping[str, Any]:
        if number not in known:
            known[number] = documents[number]
        return known[number]

    def ids(number: int) -> Sequence[Sequence[int]]:
        return document(number)["ids"]

    def units(number: int) -> Sequence[Sequence[int]]:
        return document(number)["units"]

    text = torch.from_numpy(np.concatenate([np.asarray(sentence, dtype=np.int64) for sentence in ids(index)]))
    plans = sample_noise(
        index,
        lambda number: [len(sentence) for sentence in ids(number)],
        len(documents),
        objective,
        keyed_generator(seed, epoch, text),
    )
    rows: dict[str, list[Any]] = {"input_ids": [], "token_type_ids": [], "special_tokens_mask": [], LABEL: []}
    with_units = all(len(document(segment.document)["units"]) for plan in plans for segment in (plan.a, plan.b))
    if with_units:
        rows["unit_ids"] = []
    for plan in plans:
        row = apply_noise(plan, ids, tokenizer.cls_token_id, tokenizer.sep_token_id)
        if with_units:
            row["unit_ids"] = apply_noise(plan, units, -1, -1)["input_ids"]
        for name, value in row.items():
            rows[name].append(value)
    return rows


class SentencePairCollator(Collator):
    """Batches with `input_ids`, `attention_mask`, `token_type_ids` [B, T] and the pair label [B].

    Alone the label is called `labels`, as next-sentence heads take it. With a masked LM besides, `labels` [B, T] are
    those of the masked LM and the pair label is `next_sentence_label`, as heads with both losses take it.
    """

    objective: SentencePairObjective

    def __init__(self, objective: SentencePairObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        self.masking: Collator | None = None
        if objective.mlm is not None:
            self.masking = objective.mlm.collator(tokenizer, **settings)
            self.masking._epoch = self._epoch

    def as_static(self) -> SentencePairCollator:
        twin = super().as_static()
        if self.masking is not None:
            twin.masking = self.masking.as_static()
        return twin

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not features:
            raise ValueError("the batch has no features: give at least one")
        if any(LABEL not in feature or "token_type_ids" not in feature for feature in features):
            raise ValueError(
                f"a feature lacks {LABEL!r} or 'token_type_ids': make the rows with sentence_pairs(), and set "
                "remove_unused_columns=False so that Trainer keeps them"
            )
        labels = torch.tensor([int(feature[LABEL]) for feature in features])
        if self.masking is not None:
            return self.masking(features) | {LABEL: labels}
        return self.pad_inputs([read_row(feature, self.columns) for feature in features]) | {"labels": labels}


@dataclass(frozen=True, kw_only=True)
class SentencePairObjective(Objective):
    """What both pair objectives share.

    Args:
        max_seq_length: longest row with its three special tokens; `pretrain` takes no more than its --block_size.
        short_seq_prob: how often a document is cut in rows of a random shorter length (at least 2 tokens).
        mlm: a masked LM on the same rows, as in BERT and ALBERT: its settings, or 'mlm' for the usual ones; None: the
            pair label alone.
        dupe_factor: how often the documents are gone through, each time cut in other pairs.
    """

    max_seq_length: int = bounded(512, least=5)
    short_seq_prob: float | int = bounded(0.1, least=0, most=1)
    mlm: MaskedLMObjective | None = None
    dupe_factor: int = bounded(1, least=1)

    head: ClassVar[str] = "NextSentencePrediction"
    collates: ClassVar[type[Collator]] = SentencePairCollator
    target = "label"
    add_special_tokens: ClassVar[bool] = True
    rows = "segment_pairs"
    sample_by = "paragraph"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    replaces_second: ClassVar[bool]  # label 1: B from another document (True), or A and B swapped (False)
    classes: ClassVar[int] = 2  # of the label

    def __post_init__(self) -> None:
        if self.mlm is not None:
            object.__setattr__(self, "mlm", build_objective(self.mlm))  # a name, or a dict from a config file
            object.__setattr__(self, "head", "PreTraining")
            object.__setattr__(self, "target", "token")
        super().__post_init__()

    def config_fields(self) -> dict[str, Any]:
        return {} if self.mlm is None else {"pretraining": {"sentence_pairs": {"classes": self.classes}}}

    @property
    def masks_units(self) -> bool:
        return self.mlm is not None and self.mlm.masks_units

    def sample_second(self, sentences: int, generator: torch.Generator) -> int | None:
        """The label for a chunk of so many sentences; None: the chunk gives no row."""
        raise NotImplementedError


@register("nsp")
class NextSentenceObjective(SentencePairObjective):
    """Does B follow A (label 0), or does it come from another document (label 1, with probability `random_prob`)?

    A chunk of one sentence has no second half, so it always gets label 1.

    random_prob: share of the chunks whose second text is of another document.
    """

    random_prob: float | int = bounded(0.5, least=0, most=1)

    summary: ClassVar[str] = "whether one text follows the other, or is of another document (BERT)"
    corrupts: ClassVar[str] = "half of the second texts: from another document"
    replaces_second: ClassVar[bool] = True

    def sample_second(self, sentences: int, generator: torch.Generator) -> int | None:
        return 1 if sentences == 1 else int(_chance(generator) < self.random_prob)


@register("sop")
class SentenceOrderObjective(SentencePairObjective):
    """Are two consecutive segments in order (label 0) or swapped (label 1, with probability `swap_prob`)?

    A chunk of one sentence is left out. (ALBERT's data code pairs it with a random document, which is another task.)

    swap_prob: share of the pairs that are swapped.
    """

    swap_prob: float | int = bounded(0.5, least=0, most=1)

    summary: ClassVar[str] = "whether two texts are in order (ALBERT)"
    corrupts: ClassVar[str] = "half of the pairs: swapped"
    replaces_second: ClassVar[bool] = False

    def sample_second(self, sentences: int, generator: torch.Generator) -> int | None:
        return None if sentences == 1 else int(_chance(generator) < self.swap_prob)
