# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling with the four selection rules in use, per token or per whole word.

Sources: Devlin et al. 2019 (3.1, task 1; appendix A.1 and C.2), Liu et al. 2019 (4.1, dynamic masking), Lan et al.
2020 (3.1 n-gram masking, equation in 4.1), Cui et al. 2019 (whole words). The rules differ in how many tokens they
choose, which is why they are separate modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import (
    IGNORE_INDEX,
    TOKEN_COLUMNS,
    Collator,
    Objective,
    Row,
    is_special,
    pad_rows,
    plain_ids,
    register,
)

KEEP, MASK, RANDOM = 0, 1, 2  # what happens to the input at a chosen position


@dataclass
class MaskNoise:
    """All that is random about a row: `selected` bool [n], `action` int8 [n], `random_ids` int64 [n]."""

    selected: Tensor
    action: Tensor
    random_ids: Tensor


def apply_noise(ids: Tensor, noise: MaskNoise, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """(input_ids, labels), each of the shape of `ids`: corrupted at the selected positions, -100 elsewhere."""
    labels = torch.where(noise.selected, ids, IGNORE_INDEX)
    inputs = torch.where(noise.selected & (noise.action == MASK), mask_token_id, ids)
    inputs = torch.where(noise.selected & (noise.action == RANDOM), noise.random_ids, inputs)
    return inputs, labels


def padded(noises: Sequence[MaskNoise], width: int, side: str) -> MaskNoise:
    """Of the rows of a batch, each [B, width]."""
    return MaskNoise(
        pad_rows([noise.selected for noise in noises], False, width, side),
        pad_rows([noise.action for noise in noises], KEEP, width, side),
        pad_rows([noise.random_ids for noise in noises], 0, width, side),
    )


def actions(draw: Tensor, objective: Any) -> Tensor:
    """[n] int8: what happens to each token, if it is chosen, by `mask_token_prob` and `random_prob`. draw: [n], from
    0 to 1."""
    action = torch.full_like(draw, KEEP, dtype=torch.int8)
    action[draw < objective.mask_token_prob + objective.random_prob] = RANDOM
    action[draw < objective.mask_token_prob] = MASK
    return action


def sample_noise(
    special: Tensor,
    objective: MaskedLMObjective,
    vocabulary: Tensor,
    generator: torch.Generator,
    unit_ids: Tensor | None = None,
) -> MaskNoise:
    """Draw the noise of one row.

    `special` [n] bool: positions that are never targets. `vocabulary` [V] int64: the ids a random replacement is drawn
    from. `unit_ids` [n] int64: a run of equal ids is one unit that is chosen or left as a whole, -1 is special;
    None: every token is a unit.
    """
    selected = select_targets(special, objective, generator, unit_ids)
    action = actions(torch.rand(len(special), generator=generator, dtype=torch.float64), objective)
    random_ids = vocabulary[torch.randint(len(vocabulary), (len(special),), generator=generator)]
    return MaskNoise(selected, action, random_ids)


def select_targets(
    special: Tensor, objective: MaskedLMObjective, generator: torch.Generator, unit_ids: Tensor | None = None
) -> Tensor:
    """Which positions [n] bool become targets. At least one does, unless every position is special."""
    if unit_ids is None:
        owner, lengths, free = None, torch.ones_like(special, dtype=torch.int64), ~special
    else:
        special = special | (unit_ids < 0)
        starts = special.clone()  # every special token stands alone, as it does when units are tokens
        starts[:1] = True
        starts[1:] |= (unit_ids[1:] != unit_ids[:-1]) | special[:-1]
        owner = starts.cumsum(0) - 1
        lengths, free = torch.bincount(owner), ~special[starts]
    if not bool(free.any()):
        return torch.zeros_like(special)
    chosen = _RULES[objective.selection](objective, lengths, free, generator)
    if not bool(chosen.any()):
        # A row without target gives a mean over nothing, which is NaN. One unit is chosen even if it is over budget.
        candidates = free.nonzero().squeeze(1)
        chosen[candidates[torch.randint(len(candidates), (1,), generator=generator)]] = True
    return chosen if owner is None else chosen[owner]


def _bernoulli_rule(objective: MaskedLMObjective, lengths: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """hf: each unit on its own with probability `mask_prob`."""
    return (torch.rand(len(free), generator=generator, dtype=torch.float64) < objective.mask_prob) & free


def _roberta_rule(objective: MaskedLMObjective, lengths: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """roberta: floor(p * units + U(0, 1)) units without replacement over the row.

    The draw is over the whole row and special tokens are then taken out. (fairseq leaves them in as targets.)
    The probability of each unit is exactly `mask_prob`.
    """
    count = int(objective.mask_prob * len(free) + float(torch.rand((), generator=generator, dtype=torch.float64)))
    chosen = torch.zeros_like(free)
    chosen[torch.randperm(len(free), generator=generator)[:count]] = True
    return chosen & free


def _budget_rule(objective: MaskedLMObjective, lengths: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """bert and ngram: units in random order until round(p * n) tokens are chosen, n counting special tokens."""
    budget = max(1, round(objective.mask_prob * int(lengths.sum())))
    if objective.max_predictions is not None:
        budget = min(budget, objective.max_predictions)
    order = torch.randperm(len(free), generator=generator)
    order = order[free[order]]
    longest = objective.ngram_longest
    if longest == 1 and len(free) == int(lengths.sum()):
        chosen = torch.zeros_like(free)
        chosen[order[:budget]] = True
        return chosen
    sizes = torch.ones_like(order)
    if longest > 1:
        weights = 1.0 / torch.arange(1, longest + 1, dtype=torch.float64)
        sizes += torch.multinomial(weights, len(order), replacement=True, generator=generator)
    return torch.tensor(_fill_budget(order.tolist(), sizes.tolist(), lengths.tolist(), free.tolist(), budget))


def _fill_budget(order: list[int], sizes: list[int], lengths: list[int], free: list[bool], budget: int) -> list[bool]:
    """Which units the n-grams take: an n-gram is shortened to fit the budget, skipped if it overlaps or cannot fit.

    An n-gram ends before a special token. The loop visits units, not tokens, and stops when the budget is spent.
    """
    taken = [False] * len(free)
    for start, size in zip(order, sizes, strict=True):
        if budget == 0:
            break
        stop, spent = start, 0
        while stop < len(free) and stop - start < size and free[stop] and spent + lengths[stop] <= budget:
            spent += lengths[stop]
            stop += 1
        if stop == start or any(taken[start:stop]):
            continue
        taken[start:stop] = [True] * (stop - start)
        budget -= spent
    return taken


_RULES = {"bert": _budget_rule, "ngram": _budget_rule, "roberta": _roberta_rule, "hf": _bernoulli_rule}


def word_unit_ids(encoding: Any) -> list[int] | list[list[int]]:
    """Unit ids for whole words from what a fast tokenizer returned: one word one id, -1 for special tokens.

    `encoding` is a `BatchEncoding` of one text (or pair) or of a batch, or a `tokenizers.Encoding`. Words of the
    second text of a pair get ids of their own. Raises ValueError if the encoding knows no words (slow tokenizer).
    """
    if hasattr(encoding, "word_ids") and not callable(encoding.word_ids):  # tokenizers.Encoding
        return merge_words(encoding.word_ids, encoding.sequence_ids)
    if not getattr(encoding, "is_fast", False):
        raise ValueError(
            f"{type(encoding).__name__} knows no words: encode with a fast tokenizer, or make unit_ids yourself"
        )
    units = [merge_words(item.word_ids, item.sequence_ids) for item in encoding.encodings]
    ids = encoding["input_ids"]
    single = len(units) == 1 and not (len(ids) and hasattr(ids[0], "__len__") and getattr(ids[0], "ndim", 1) > 0)
    return units[0] if single else units


def merge_words(words: list[int | None], sequences: list[int | None]) -> list[int]:
    """Unit ids from the word and the sequence of each token; words of later sequences are counted on."""
    offsets = [0]  # first free id of each sequence
    for sequence in range(max((s for s in sequences if s is not None), default=0)):
        last = max((w for w, s in zip(words, sequences, strict=True) if s == sequence and w is not None), default=-1)
        offsets.append(offsets[-1] + last + 1)
    return [-1 if w is None else w + offsets[s or 0] for w, s in zip(words, sequences, strict=True)]


def given_units(row: Row) -> Tensor:
    """The column [n] that says which tokens are one word. Raises ValueError if the row has none."""
    for name in ("unit_ids", "word_ids"):
        if name in row.columns:
            return row.columns[name]
    raise ValueError(
        f"whole words need the column 'unit_ids' or 'word_ids', not only {['input_ids', *row.columns]}: "
        "add it with word_unit_ids(tokenizer(text)) and set remove_unused_columns=False, or set whole_word=False"
    )


class MaskingCollator(Collator):
    """Base of collators that mask tokens and put random ones, of `vocabulary`, in the place of some.

    Attributes:
        masked: what the mask token stands for, in the message that it is missing.
    """

    masked: ClassVar[str] = "masked words"

    def __init__(self, objective: Objective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        if tokenizer.mask_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__} has no mask token, which stands for {self.masked}: add one")
        self.mask_token_id = tokenizer.mask_token_id
        self.vocabulary = plain_ids(tokenizer)


class MaskedLMCollator(Collator):
    """Batches with `input_ids`, `attention_mask`, `labels` [B, T] (and token columns the features bring)."""

    objective: MaskedLMObjective
    columns = (*TOKEN_COLUMNS, "special_tokens_mask", "unit_ids", "word_ids")

    def __init__(self, objective: MaskedLMObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no mask token: add one with "
                "add_special_tokens({'mask_token': '[MASK]'}) and resize the embeddings, or use the 'clm' objective"
            )
        self.period = objective.dupe_factor
        self.mask_token_id = tokenizer.mask_token_id
        vocabulary = torch.tensor(sorted(set(tokenizer.get_vocab().values())), dtype=torch.int64)
        if objective.random_ids == "non_special":
            vocabulary = vocabulary[~is_special(vocabulary, self.special)]
        if objective.random_prob > 0 and not len(vocabulary):
            raise ValueError("the tokenizer has only special tokens: set random_vocab='all' or random_prob=0")
        self.vocabulary = vocabulary if len(vocabulary) else torch.zeros(1, dtype=torch.int64)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = self.pad_inputs(rows)
        noises = [self.noise(row) for row in rows]
        noise = padded(noises, batch["input_ids"].shape[1], self.padding_side)
        batch["input_ids"], batch["labels"] = apply_noise(batch["input_ids"], noise, self.mask_token_id)
        return batch

    def noise(self, row: Row) -> MaskNoise:
        special = self.special_tokens(row)
        return sample_noise(special, self.objective, self.vocabulary, self.generator(row.ids), self.units(row))

    def units(self, row: Row) -> Tensor | None:
        return given_units(row) if self.objective.masks_units else None


@register("mlm")
class MaskedLMObjective(Objective):
    """Predict chosen tokens from a row in which they are masked (.8), replaced at random (.1), or kept (.1).

    Args:
        mask_prob: share p of the tokens that are predicted.
        mask_token_prob: share of these that are masked.
        random_prob: share of these that are replaced by a random token.
        selection: which positions, n = row length with special tokens, p = `mask_prob`:
            "bert": min(max_predictions, max(1, round(p n))) positions that are not special;
            "roberta": floor(p n + U(0, 1)) positions over the row;
            "hf": each position that is not special with probability p;
            "ngram": as bert, in n-grams of words of length 1..ngram_max with p(n) ~ 1/n (ALBERT, DeBERTa).
            Rules that end with no position take one, so every row has a target.
        whole_word: choose units (column `unit_ids` or `word_ids`) as a whole; None: only for "ngram". With "bert" a
            word over the budget is skipped (BERT-wwm). The 80/10/10 draw is per token.
        max_predictions: cap for "bert" and "ngram"; None: no cap.
        ngram_max: longest n-gram of "ngram"; None: 3.
        random_vocab: what a random replacement is drawn from; None: as in the official code of the mode, which is
            "non_special" for "roberta" and "all" for the others.
        dupe_factor: number of different masks per row, used in turn over the epochs: None dynamic masking, 1 static
            masking, 10 the data preparation of BERT.
    """

    mask_prob: float | int = bounded(0.15, above=0, below=1)
    mask_token_prob: float | int = bounded(0.8, least=0, most=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)
    selection: Literal["bert", "roberta", "hf", "ngram"] = "bert"
    whole_word: bool | None = None
    max_predictions: int | None = bounded(None, least=1)
    ngram_max: int | None = bounded(None, least=1)
    random_vocab: Literal["all", "non_special"] | None = None
    dupe_factor: int | None = bounded(None, least=1)

    summary: ClassVar[str] = "tokens that are masked, replaced or kept, from both sides (BERT)"
    corrupts: ClassVar[str] = "15 % of the tokens: masked, random or kept"
    head: ClassVar[str] = "MaskedLM"
    collates: ClassVar[type[Collator]] = MaskedLMCollator
    preferred: ClassVar[bool] = True
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    add_special_tokens: ClassVar[bool] = True

    def check_fields(self) -> None:
        total = self.mask_token_prob + self.random_prob
        self._require(total <= 1 + 1e-9, f"mask_token_prob + random_prob is {total}: it must not exceed 1")
        self._require(
            self.max_predictions is None or self.selection in ("bert", "ngram"),
            f"max_predictions caps only the selections 'bert' and 'ngram', not {self.selection!r}: leave it None",
        )
        self._require(
            self.ngram_max is None or self.selection == "ngram",
            f"ngram_max belongs to selection='ngram', not to {self.selection!r}: leave it None",
        )

    @property
    def masks_units(self) -> bool:
        return self.selection == "ngram" if self.whole_word is None else self.whole_word

    @property
    def ngram_longest(self) -> int:
        return (self.ngram_max or 3) if self.selection == "ngram" else 1

    @property
    def random_ids(self) -> str:
        return self.random_vocab or ("non_special" if self.selection == "roberta" else "all")
