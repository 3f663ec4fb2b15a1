# SPDX-License-Identifier: Apache-2.0
"""Cloze prediction under four masks (Dong et al. 2019, UniLM, arXiv 1905.03197, sections 2.2 to 2.5).

A row [SOS] S1 [EOS] S2 [EOS] is read from both sides, as source and target, or as one text from the left or the right.
What is masked is told at its own place: labels are not shifted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core.components import bounded
from ..core.mask_modes import ALL_TYPES, BIDIRECTIONAL, LEFT_TO_RIGHT, MODES, RIGHT_TO_LEFT, SEQ2SEQ, TYPES
from .base import IGNORE_INDEX, Row, pad_rows, read_row, register
from .masked_lm import MaskedLMCollator, MaskedLMObjective, MaskNoise, _fill_budget, actions, apply_noise
from .sentence_pairs import LABEL, SentencePairObjective, _chance

AnyUniLM = TypeVar("AnyUniLM", bound="UniLMObjective")

# The order in which the paper names the modes, and that of `mode_probs`.
ORDER = (BIDIRECTIONAL, SEQ2SEQ, LEFT_TO_RIGHT, RIGHT_TO_LEFT)


def in_mode(ids: Tensor, second: Tensor, mode: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row [SOS] S1 [EOS] S2 [EOS], `second` [n] bool: S2 and what ends it -> (ids, which are of the second text,
    which tokens [n] of the row are kept). From one side it is one text: the first [EOS] goes, and all of it is
    first."""
    kept = torch.ones_like(second)
    if mode in (LEFT_TO_RIGHT, RIGHT_TO_LEFT):
        if bool(second.any()):
            kept[int(second.int().argmax()) - 1] = False
        return ids[kept], torch.zeros_like(second)[kept], kept
    return ids, second, kept


def sample_mode(label: int, objective: UniLMObjective, generator: torch.Generator) -> int:
    """The mode of a row: bidirectional where its second text is of elsewhere (label 1), and else as often as makes the
    whole mix that of `mode_probs`."""
    draw = _chance(generator)
    if label == 1:
        return BIDIRECTIONAL
    shares = list(objective.mode_probs)
    shares[0] *= 1 - objective.random_prob
    total = sum(shares)
    for mode, share in zip(ORDER, shares, strict=True):
        draw -= share / total
        if draw < 0:
            return mode
    return next(mode for mode, share in zip(reversed(ORDER), reversed(shares)) if share > 0)


def sample_noise(
    special: Tensor,
    second: Tensor,
    mode: int,
    objective: UniLMObjective,
    vocabulary: Tensor,
    generator: torch.Generator,
) -> MaskNoise:
    """Draw the masks of a row. special, second [n] bool; vocabulary [V]: what random tokens are drawn from.

    Pretraining: max(1, round(mask_prob n)) tokens in a random order, each alone or, with `ngram_prob`, with the next
    one or two. Fine-tuning (`target_mask_prob`): tokens of the second text of a row of source and target, its end
    included.
    """
    mlm, length = objective.masking, len(special)
    if mode == SEQ2SEQ and objective.target_mask_prob is not None:
        places = second.nonzero().squeeze(1)
        count = max(1, round(objective.target_mask_prob * len(places)))
        selected = torch.zeros_like(special)
        selected[places[torch.randperm(len(places), generator=generator)[:count]]] = True
    else:
        budget = max(1, round(mlm.mask_prob * length))
        order = torch.randperm(length, generator=generator)
        order = order[~special[order]]
        several = torch.rand(len(order), generator=generator, dtype=torch.float64) < objective.ngram_prob
        sizes = torch.where(several, torch.randint(2, 4, (len(order),), generator=generator), 1)
        free = (~special).tolist()
        selected = torch.tensor(_fill_budget(order.tolist(), sizes.tolist(), [1] * length, free, budget)).bool()
    action = actions(torch.rand(length, generator=generator, dtype=torch.float64), mlm)
    return MaskNoise(selected, action, vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)])


class UniLMCollator(MaskedLMCollator):
    """Batches with `input_ids`, `attention_mask`, `token_type_ids`, `labels` [B, T], `mask_modes` [B, 2] and
    `next_sentence_label` [B] (-100 but for rows read from both sides)."""

    def __init__(self, objective: UniLMObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective.masking, tokenizer, **settings)
        self.unilm = objective

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not features:
            raise ValueError("the batch has no features: give at least one")
        rows, labels = [], []
        for feature in features:
            row = read_row(feature, self.columns)
            if "token_type_ids" not in row.columns:
                raise ValueError(
                    "a feature lacks 'token_type_ids': encode source and target as a pair, tokenizer(source, target),"
                    " or make the rows with sentence_pairs()"
                )
            rows.append(row)
            labels.append(int(feature.get(LABEL, 0)))
        made = [self.corrupted(row, label) for row, label in zip(rows, labels, strict=True)]
        batch = self.pad_inputs([row for row, *_ in made])
        shape = batch["input_ids"].shape[1], self.padding_side
        batch["labels"] = pad_rows([targets for _, targets, _ in made], IGNORE_INDEX, *shape)
        batch[MODES] = torch.tensor([modes for *_, modes in made])
        batch[LABEL] = torch.where(batch[MODES][:, 0] == BIDIRECTIONAL, torch.tensor(labels), IGNORE_INDEX)
        return batch

    def corrupted(self, row: Row, label: int) -> tuple[Row, Tensor, tuple[int, int]]:
        """A row without padding and the label of its pair -> (row, labels [n], (mode, length of the first text))."""
        special = self.special_tokens(row)
        generator, types = self.generator(row.ids), row.columns["token_type_ids"]
        mode = sample_mode(label, self.unilm, generator)
        ids, second, kept = in_mode(row.ids, types > 0, mode)
        if mode == SEQ2SEQ and not bool(second.any()):
            raise ValueError(
                "a row has no second text (token type 1) to be a target: encode tokenizer(source, target)"
            )
        noise = sample_noise(special[kept], second, mode, self.unilm, self.vocabulary, generator)
        inputs, labels = apply_noise(ids, noise, self.mask_token_id)
        columns = {name: column[kept] for name, column in row.columns.items()}
        first_type, second_type = TYPES[mode] if self.unilm.segment_ids_per_mode else (0, 1)
        columns["token_type_ids"] = torch.where(second, second_type, first_type)
        width = row.width if row.width > len(row) else len(ids)  # rows that came padded keep their length
        return Row(inputs, columns, width), labels, (mode, int((~second).sum()))


@register("unilm")
class UniLMObjective(SentencePairObjective):
    """Predict masked tokens under four masks, and, in rows read from both sides, whether the second text follows.

    Args:
        mode_probs: shares of the rows that are read from both sides, as source and target, from the left, and from the
            right.
        segment_ids_per_mode: token types of their own in every mode (six); False: 0 and 1 in all.
        ngram_prob: how often a masked token is masked together with the next one or two.
        target_mask_prob: share of a target's tokens, its end included, that are masked in rows of source and target:
            for fine-tuning (the paper: 0.7), with mode_probs 0,1,0,0; None: as in all other rows.
        random_prob: share of the rows read from both sides whose second text is of another document.
        mlm: share of the tokens that are masked, and what becomes of them.
    """

    mlm: MaskedLMObjective | None = MaskedLMObjective()
    mode_probs: tuple[float | int, float | int, float | int, float | int] = (1 / 3, 1 / 3, 1 / 6, 1 / 6)
    segment_ids_per_mode: bool = True
    ngram_prob: float | int = bounded(0.2, least=0, most=1)
    target_mask_prob: float | int | None = bounded(None, above=0, most=1)
    random_prob: float | int = bounded(0.5, least=0, most=1)

    summary: ClassVar[str] = "masked tokens, read from both sides, either side, or as a target (UniLM)"
    corrupts: ClassVar[str] = "15 % of the tokens, singly or in bigrams and trigrams; what a token may see"
    head: ClassVar[str] = "PreTraining"
    collates = UniLMCollator
    component: ClassVar[tuple[str, str] | None] = ("stack", "mask_modes")

    @property
    def replaces_second(self) -> bool:  # type: ignore[override]
        return self.mode_probs[0] * self.random_prob > 0

    @property
    def masking(self) -> MaskedLMObjective:
        return self.mlm or MaskedLMObjective()

    def check_fields(self) -> None:
        self._require(self.mlm is not None, "mlm must be the settings of a masked LM, which this objective includes")
        self._require(
            self.masking.selection == "bert" and not self.masking.masks_units and self.masking.max_predictions is None,
            "mlm says how much is masked, and `ngram_prob` in which pieces: leave its selection, whole_word and"
            " max_predictions out",
        )
        self._require(
            min(self.mode_probs) >= 0 and math.isclose(sum(self.mode_probs), 1, abs_tol=1e-3),
            f"mode_probs are four shares with the sum 1, not {self.mode_probs}",
        )
        share = self.target_mask_prob
        self._require(
            share is None or self.mode_probs[1] > 0,
            "target_mask_prob is of rows of source and target: give them a share in mode_probs (0,1,0,0)",
        )

    def bound_to(self: AnyUniLM, config: Any) -> AnyUniLM:
        """Raises ValueError for a model that cannot tell the modes by types of tokens."""
        types = config.type_vocab_size
        least = ALL_TYPES if self.segment_ids_per_mode else 2
        if types < least:
            raise ValueError(
                f"objective 'unilm' gives {least} types of tokens, and the model has type_vocab_size={types}: build it"
                f" with --type_vocab_size {least}"
                + (", or give --objective.segment_ids_per_mode false" if types >= 2 else "")
            )
        return self

    def sample_second(self, sentences: int, generator: torch.Generator) -> int | None:
        draw = _chance(generator)
        return None if sentences == 1 else int(draw < self.mode_probs[0] * self.random_prob)
