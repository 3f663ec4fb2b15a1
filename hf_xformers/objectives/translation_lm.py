# SPDX-License-Identifier: Apache-2.0
"""Objectives of texts in several languages: masked tokens of a sentence and its translation, and of single streams.

Source: Conneau and Lample 2019 (XLM, arXiv 1901.07291), section 3.1 to 3.4, and its code: `concat_batches` (the row of
a pair), `mask_out` (which tokens).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import TOKEN_COLUMNS, Collator, Objective, Row, is_special, pad_rows, read_row, register
from .causal_lm import causal_labels
from .masked_lm import MaskNoise, actions, apply_noise, padded

AnyMultilingual = TypeVar("AnyMultilingual", bound="Multilingual")
LANGUAGES, COUNTS = "langs", "token_counts"


def pair_row(first: Sequence[int], second: Sequence[int], end: int, *, reset: bool = True) -> dict[str, list[int]]:
    """The row `end s1 end end s2 end` of a pair of sentences: `input_ids`, `position_ids`, which start again at the
    second one with `reset`, and `langs`, 0 for the first and 1 for the second."""
    sizes = len(first) + 2, len(second) + 2
    second_positions = range(sizes[1]) if reset else range(sizes[0], sum(sizes))
    return {
        "input_ids": [end, *first, end, end, *second, end],
        "position_ids": [*range(sizes[0]), *second_positions],
        LANGUAGES: [0] * sizes[0] + [1] * sizes[1],
    }


def shortened(first: Sequence[int], second: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both sentences in `room` tokens: the longer one loses its end, down to half of the room."""
    excess = len(first) + len(second) - room
    if excess > 0:
        half = room // 2
        if len(first) <= half:
            second = second[: room - len(first)]
        elif len(second) <= half:
            first = first[: room - len(second)]
        else:
            first, second = first[: room - half], second[:half]
    return first, second


def sample_noise(
    free: Tensor,
    counts: Tensor | None,
    objective: TranslationLMObjective,
    vocabulary: int,
    generator: torch.Generator,
) -> MaskNoise:
    """Draw the noise of a row. free [n] bool: tokens that may be targets; counts [n]: how often each token occurs in
    the text, for the weights counts^-alpha of `sample_alpha`.

    ceil(mask_prob n) tokens without replacement, with alpha 0 each one by itself with probability `mask_prob`; one at
    least. The official code draws from a batch together; here a row does not depend on its neighbors.
    """
    length = len(free)
    selected = torch.zeros(length, dtype=torch.bool)
    if objective.sample_alpha == 0:
        selected = (torch.rand(length, generator=generator, dtype=torch.float64) < objective.mask_prob) & free
    if not bool(selected.any()) and bool(free.any()):
        wanted = 1 if objective.sample_alpha == 0 else math.ceil(objective.mask_prob * length)
        weights = free.double()
        if counts is not None and objective.sample_alpha:
            weights = weights * counts.clamp(min=1).double() ** -objective.sample_alpha
        chosen = torch.multinomial(weights, min(wanted, int(free.sum())), replacement=False, generator=generator)
        selected[chosen] = True
    action = actions(torch.rand(length, generator=generator, dtype=torch.float64), objective)
    return MaskNoise(selected, action, torch.randint(vocabulary, (length,), generator=generator))


class MultilingualCollator(Collator):
    """What both collators share: `langs` [B, T], by the numbers of the model that the objective is bound to."""

    objective: Multilingual
    columns = (*TOKEN_COLUMNS, LANGUAGES, COUNTS)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not features:
            raise ValueError("the batch has no features: give at least one")
        if any(LANGUAGES not in feature for feature in features):
            raise ValueError(
                f"a feature lacks {LANGUAGES!r}: make the rows with `language_rows` or `pair_row`, and set"
                " remove_unused_columns=False so that Trainer keeps them"
            )
        # The mask stays where positions restart: a sentence shall see its translation.
        return self.collate([read_row(feature, self.columns) for feature in features])

    def pad_inputs(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = super().pad_inputs(rows)
        if self.objective.lang_embedding:
            numbers = torch.tensor(self.objective.language_ids)
            length = batch["input_ids"].shape[1]
            batch[LANGUAGES] = pad_rows(
                [numbers[row.columns[LANGUAGES]] for row in rows], 0, length, self.padding_side
            )
        return batch


class TranslationLMCollator(MultilingualCollator):
    """Batches with `input_ids`, `attention_mask`, `position_ids`, `langs` and `labels` [B, T]."""

    objective: TranslationLMObjective

    def __init__(self, objective: TranslationLMObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no mask token: add one with load_tokenizer(...,"
                " add_missing=['mask']) and resize the embeddings, or take the objective 'multilingual_clm'"
            )
        self.vocabulary = len(tokenizer)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        noises = [self.noise(row) for row in rows]
        noise = padded(noises, batch["input_ids"].shape[1], self.padding_side)
        batch["input_ids"], batch["labels"] = apply_noise(batch["input_ids"], noise, self.tokenizer.mask_token_id)
        return batch

    def noise(self, row: Row) -> MaskNoise:
        free = ~is_special(row.ids, self.special)
        free[:1] = False
        return sample_noise(free, row.columns.get(COUNTS), self.objective, self.vocabulary, self.generator(row.ids))


class MultilingualCLMCollator(MultilingualCollator):
    """Batches with `input_ids`, `attention_mask`, `langs` and `labels` [B, T]. No shift."""

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        batch["labels"] = causal_labels(batch["input_ids"], batch["attention_mask"])
        return batch


@dataclass(frozen=True, kw_only=True)
class Multilingual(Objective):
    """What objectives of several languages share.

    Args:
        languages: the two of the text, as its columns or the suffixes of its files are called.
        lang_embedding: whether every token has a vector of its language: the input `langs`.
        lg_sampling_factor: f of q_l ~ p_l^f, the share of a language's rows, where p_l is its share of the tokens of
            single streams; 1: as the text has it.
    """

    languages: tuple[str, ...] = ("en", "de")
    lang_embedding: bool = True
    lg_sampling_factor: float | int = bounded(0.7, least=0, most=1)

    rows = "parallel"
    language_ids: ClassVar[tuple[int, ...]] = ()  # of `languages`, in the table of the model

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "language_ids", tuple(range(len(self.languages))))

    def check_fields(self) -> None:
        self._require(
            len(self.languages) == 2 and self.languages[0] != self.languages[1],
            f"languages must be two that differ, such as en,de, not {list(self.languages)}",
        )

    @property
    def tasks_of_rows(self) -> tuple[str, ...]:
        """Which rows there are: `streams` of one language, `pairs` of translations, or both."""
        return ("streams",)

    def component_fields(self) -> dict[str, dict[str, Any]]:
        return {"embedding": {"languages": self.languages}} if self.lang_embedding else {}

    def bound_to(self: AnyMultilingual, config: Any) -> AnyMultilingual:
        """With the numbers that the model has for the languages. Raises ValueError for one that it does not know."""
        known = tuple(getattr(getattr(config, "embedding", None), "languages", ()))
        if not self.lang_embedding:
            return self
        unknown = [language for language in self.languages if language not in known]
        if unknown:
            raise ValueError(
                f"language {unknown[0]!r} is unknown to the model's config, which has"
                f" {', '.join(map(repr, known)) or 'none'}; name it in --embedding.languages of a new model, take"
                " --objective.languages that are there, or --objective.lang_embedding false"
            )
        bound = copy.copy(self)
        object.__setattr__(bound, "language_ids", tuple(known.index(language) for language in self.languages))
        return bound


@register("tlm", aliases=("translation_lm",))
class TranslationLMObjective(Multilingual):
    """Predict masked tokens of a sentence and its translation, side by side, so that each can help the other.

    Args:
        tasks: `pairs`: rows of a sentence and its translation (TLM); `streams`: of text in one language (MLM).
        mask_prob: share of a row's tokens that are predicted, rounded up.
        mask_token_prob: share of these that are masked.
        random_prob: share of these that are replaced by a random token; the rest stand as they are.
        sample_alpha: tokens are chosen with probability ~ frequency^-alpha; 0: all alike, each by itself.
        reset_positions: whether the positions of the second sentence start again.

    The other settings: languages (the two of the text, as columns or suffixes of files), lang_embedding (whether every
    token has a vector of its language), lg_sampling_factor (f of q_l ~ p_l^f, the shares of the languages in streams).
    """

    tasks: tuple[Literal["pairs", "streams"], ...] = ("pairs",)
    mask_prob: float | int = bounded(0.15, above=0, below=1)
    mask_token_prob: float | int = 0.8
    random_prob: float | int = 0.1
    sample_alpha: float | int = bounded(0.5, least=0)
    reset_positions: bool = True

    summary: ClassVar[str] = "masked tokens of a sentence and its translation (XLM)"
    corrupts: ClassVar[str] = "15 % of the tokens, rare ones more often: masked, random or kept"
    head: ClassVar[str] = "MaskedLM"
    collates = TranslationLMCollator
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")

    def check_fields(self) -> None:
        super().check_fields()
        total = self.mask_token_prob + self.random_prob
        self._require(
            min(self.mask_token_prob, self.random_prob) >= 0 and total <= 1 + 1e-9,
            f"mask_token_prob {self.mask_token_prob} and random_prob {self.random_prob} must be at least 0 and add up"
            " to no more than 1",
        )
        self._require(bool(self.tasks), "tasks must name 'pairs', 'streams' or both")

    @property
    def tasks_of_rows(self) -> tuple[str, ...]:
        return self.tasks


@register("multilingual_clm")
class MultilingualCLMObjective(Multilingual):
    """Predict each token from those before it, in streams of text in one language each.

    Args:
        languages: the two of the text, as its columns or the suffixes of its files are called.
        lang_embedding: whether every token has a vector of its language: the input `langs`.
        lg_sampling_factor: f of q_l ~ p_l^f, the share of a language's rows, where p_l is its share of the tokens.
    """

    summary: ClassVar[str] = "each token from those before it, of several languages (XLM)"
    head: ClassVar[str] = "CausalLM"
    collates = MultilingualCLMCollator
    shape = "decoder"
    tokenizer_style = "gpt"
