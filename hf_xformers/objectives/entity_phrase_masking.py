# SPDX-License-Identifier: Apache-2.0
"""Masking of words, phrases and entities as wholes, ERNIE's knowledge masking.

Source: Sun et al. 2019 (arXiv 1904.09223), section 3.2, and the released code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import Row, register
from .masked_lm import MaskedLMCollator, MaskedLMObjective
from .names import NameTable, find_phrases, read_lines, words_of

LEVELS = ("word", "phrase", "entity")


class EntityPhraseCollator(MaskedLMCollator):
    """Batches as for masked LM. The units of a row are its column `unit_ids`, or made of its `word_ids`."""

    objective: EntityPhraseObjective

    def __init__(self, objective: EntityPhraseObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        self.tables: dict[str, NameTable[None]] = {}
        for level in LEVELS[1:]:
            names = objective.names(level)
            if names is not None:
                self.tables[level] = NameTable(dict.fromkeys(names), tokenizer)

    @property
    def level(self) -> str:
        """What is masked as a whole in the current epoch."""
        spec = self.objective
        if spec.stages is None or self.static:
            return spec.unit
        return LEVELS[sum(self.epoch >= start for start in spec.stages)]

    def units(self, row: Row) -> Tensor:
        given = super().units(row)
        assert given is not None
        level = self.level
        if "unit_ids" in row.columns or level == "word":
            return given
        if level not in self.tables:
            raise ValueError(self.objective.missing(level))
        ids, word_ids = row.ids.tolist(), given.tolist()
        words = words_of(ids, word_ids)
        units = torch.full((len(row),), -1)
        number, place = 0, 0
        for first, end, _ in [*self.tables[level].find(ids, words), (len(words), len(words), None)]:
            spans = [(word, word + 1) for word in range(place, first)] + [(first, end)]
            for start, stop in spans:
                if start < stop:
                    units[words[start][0] : words[stop - 1][1]] = number
                    number += 1
            place = end
        return units


@register("entity_phrase_masking")
class EntityPhraseObjective(MaskedLMObjective):
    """Masked language modeling in which a phrase, or the name of an entity, is masked as a whole.

    Args:
        unit: what is masked as a whole: "word", "phrase" (other words stand alone) or "entity".
        stages: epochs from which phrases, and then entities, are masked, words before: (1, 2) for ERNIE's three stages
            with unit="entity", (1,) for two with "phrase"; None: `unit` from the start.
        phrases_file: file with a phrase on each line.
        entities_file: file with the name of an entity on each line.
        phrases: the phrases themselves; None: those of the file, or those that the training text shows by itself
            (words that stand together far more often than by chance).

    A column `unit_ids` of the rows comes before all of these. The other settings are those of masked LM; each unit is
    drawn by itself, and every token of it is masked, replaced or kept by itself.
    """

    selection: Literal["bert", "roberta", "hf", "ngram"] = "hf"
    whole_word: bool | None = True
    unit: Literal["word", "phrase", "entity"] = "phrase"
    stages: tuple[int, ...] | None = None
    phrases_file: str | None = None
    entities_file: str | None = None
    phrases: tuple[str, ...] | None = None

    summary: ClassVar[str] = "tokens of words, phrases or entities that are masked as wholes (ERNIE)"
    collates = EntityPhraseCollator
    preferred: ClassVar[bool] = False

    def check_fields(self) -> None:
        super().check_fields()
        self._require(self.whole_word is True, "whole_word must be True; take the objective mlm to mask single tokens")
        if self.stages is not None:
            wanted = LEVELS.index(self.unit)
            self._require(
                len(self.stages) == wanted
                and all(a < b for a, b in zip((0, *self.stages), self.stages, strict=False)),
                f"stages={self.stages} must be {wanted} ascending epochs above 0 for unit={self.unit!r}",
            )

    def names(self, level: str) -> list[str] | None:
        """The phrases or entities that are masked as wholes; None where nobody gave any, or nobody needs them."""
        if level == "entity":
            wanted = self.unit == "entity" and self.entities_file is not None
            return read_lines(str(self.entities_file), "entities_file") if wanted else None
        if self.unit == "word" or (self.unit == "entity" and self.stages is None):
            return None
        if self.phrases is not None:
            return list(self.phrases)
        return None if self.phrases_file is None else read_lines(self.phrases_file, "phrases_file")

    def missing(self, level: str) -> str:
        """What to do where names are wanted and nobody gave any."""
        if level == "entity":
            return "entities are masked by a list of them: set entities_file, or give rows a column 'unit_ids'"
        return (
            "no phrases are known: set phrases_file, call fitted(rows, tokenizer) to find them in the text, or give"
            " rows a column 'unit_ids'"
        )

    def fitted(self, rows: Any, tokenizer: Any) -> EntityPhraseObjective:
        """The objective with the phrases of the training rows, where it needs them and has none.

        Raises ValueError where there are none, or where entities are to be masked and nobody named any.
        """
        if "unit_ids" in (getattr(rows, "column_names", None) or ()):
            return self
        if self.unit == "entity" and self.entities_file is None:
            raise ValueError(self.missing("entity"))
        needs = self.unit == "phrase" or (self.unit == "entity" and self.stages is not None)
        if not needs or self.names("phrase") is not None:
            return self
        found = find_phrases(rows, tokenizer)
        if not found:
            raise ValueError(
                "no words stand together often enough in the text to be phrases: give more text, or set phrases_file"
            )
        return dataclasses.replace(self, phrases=tuple(found))
