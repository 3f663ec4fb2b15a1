# SPDX-License-Identifier: Apache-2.0
"""Which names of entities were replaced by others of their type: weakly supervised knowledge (WKLM).

Source: Xiong et al. 2020 (arXiv 1912.09637), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import IGNORE_INDEX, Objective, Row, is_special, pad_rows, register
from .entity_tables import EMBEDDED, read_table
from .masked_lm import MaskedLMObjective, MaskingCollator, MaskNoise, given_units, padded
from .masked_lm import apply_noise as mask_tokens
from .masked_lm import sample_noise as sample_masks
from .names import NameTable, row_columns, words_of


def sample_noise(
    mentions: Sequence[tuple[str, str]],
    table: Mapping[str, Sequence[str]],
    replace_prob: float,
    generator: torch.Generator,
) -> list[str | None]:
    """The name that comes to the place of each mention (type, name), None where it stays.

    A mention is replaced with probability `replace_prob`, unless the one before it was; by any other name of its type.
    """
    chosen: list[str | None] = []
    for kind, name in mentions:
        draw = float(torch.rand((), generator=generator))
        at = int(torch.randint(len(table[kind]) - 1, (), generator=generator))
        names = table[kind]
        other = names[at + (at >= names.index(name))]
        before = chosen[-1] if chosen else None
        chosen.append(other if before is None and draw < replace_prob else None)
    return chosen


def apply_noise(
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    replacements: Sequence[Sequence[int] | None],
    length: int,
    ending: int,
) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids, where the mentions then stand) of a row whose mentions `spans` [start, stop) are replaced by other tokens.

    The row is cut to `length` tokens before its last `ending` ones; a mention is left out of the list where the token
    behind it was cut off.
    """
    out: list[int] = []
    places: list[tuple[int, int]] = []
    before = 0
    for (start, stop), other in zip(spans, replacements, strict=True):
        out += ids[before:start]
        name = ids[start:stop] if other is None else other
        places.append((len(out), len(out) + len(name)))
        out += name
        before = stop
    out += ids[before:]
    if len(out) > length:
        body = length - ending
        out = [*out[:body], *out[len(out) - ending :]]
        # Where something ends the row, a mention may be followed by that.
        places = [(start, stop) for start, stop in places if stop <= body - (ending == 0)]
    return out, places


class EntityReplacementCollator(MaskingCollator):
    """Batches with `input_ids`, `attention_mask`, `labels` [B, T] (masked tokens outside of names), and for every
    mention `entity_boundaries` [B, M, 2], where the tokens around it stand, and `entity_labels` [B, M]: 1 replaced, 0
    true, -100 none."""

    objective: EntityReplacementObjective
    columns = ("special_tokens_mask", "word_ids")

    def __init__(self, objective: EntityReplacementObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        self.table = read_table(objective.entity_table)
        self.names = name_table(self.table, tokenizer)
        names = [name for names in self.table.values() for name in names]
        spelled = [tokenizer([p + n for n in names], add_special_tokens=False)["input_ids"] for p in ("", " ")]
        self.spelled = {name: pair for name, *pair in zip(names, *spelled, strict=True)}
        self.mlm = MaskedLMObjective(mask_prob=objective.mlm_prob, random_vocab="non_special")

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        changed, spans, marks, noises = zip(*map(self.corrupt, rows), strict=True)
        batch = self.pad_inputs(list(changed))
        width, side = batch["input_ids"].shape[1], self.padding_side
        noise = padded(noises, width, side)
        batch["input_ids"], batch["labels"] = mask_tokens(batch["input_ids"], noise, self.mask_token_id)
        most = max(1, *map(len, marks))
        around = torch.zeros(len(rows), most, 2, dtype=torch.int64)
        for index, (row, places) in enumerate(zip(changed, spans, strict=True)):
            shift = width - len(row) if side == "left" else 0
            for number, (start, stop) in enumerate(places):
                around[index, number, 0], around[index, number, 1] = start - 1 + shift, stop + shift
        batch["entity_boundaries"] = around
        batch["entity_labels"] = pad_rows([torch.tensor(row, dtype=torch.int64) for row in marks], IGNORE_INDEX, most)
        return batch

    def corrupt(self, row: Row) -> tuple[Row, list[tuple[int, int]], list[int], MaskNoise]:
        """(the row with other names, where its mentions stand, which were replaced, its masks)."""
        ids, generator = row.ids.tolist(), self.generator(row.ids)
        words = words_of(ids, given_units(row).tolist())
        found = [(words[first][0], words[end - 1][1], entity) for first, end, entity in self.names.find(ids, words)]
        found = [(start, stop, entity) for start, stop, entity in found if start > 0 and stop < len(ids)]
        chosen = sample_noise([entity for *_, entity in found], self.table, self.objective.replace_prob, generator)
        others: list[list[int] | None] = []
        for (start, stop, (_, name)), other in zip(found, chosen, strict=True):
            spaced = ids[start:stop] == self.spelled[name][1]
            others.append(None if other is None else self.spelled[other][spaced])
        text = (~is_special(row.ids, self.special)).nonzero().squeeze(1)
        ending = len(ids) - 1 - int(text[-1]) if len(text) else 0
        new, spans = apply_noise(ids, [entry[:2] for entry in found], others, len(ids), ending)
        changed = torch.tensor(new, dtype=torch.int64)
        kept = is_special(changed, self.special)
        for start, stop in spans:
            kept[start:stop] = True
        noise = sample_masks(kept, self.mlm, self.vocabulary, generator)
        marks = [int(other is not None) for other in chosen[: len(spans)]]
        return Row(changed, {}, row.width), spans, marks, noise


def name_table(table: Mapping[str, Sequence[str]], tokenizer: Any) -> NameTable[tuple[str, str]]:
    """Names with their types, to be found in rows."""
    return NameTable({name: (kind, name) for kind, names in table.items() for name in names}, tokenizer)


@register("entity_replacement")
class EntityReplacementObjective(Objective):
    """Say of every name of an entity whether it was replaced by another of its type, and predict masked tokens.

    Args:
        entity_table: JSON file with an object of types, each with a list of names; "stdlib": Python's own names
            (modules, exceptions, functions, types), which the embedded corpus is full of.
        replace_prob: probability that a mention is replaced, where the one before it was not.
        mlm_prob: share of tokens that are masked, all of them outside of names.
    """

    entity_table: str = EMBEDDED
    replace_prob: float | int = bounded(0.5, above=0, below=1)
    mlm_prob: float | int = bounded(0.05, above=0, below=1)

    summary: ClassVar[str] = "which names were replaced by others of their type (WKLM)"
    head: ClassVar[str] = "EntityReplacement"
    collates = EntityReplacementCollator
    add_special_tokens: ClassVar[bool] = True
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")

    @property
    def masks_units(self) -> bool:
        return True

    def fitted(self, rows: Any, tokenizer: Any) -> EntityReplacementObjective:
        """Raises ValueError where the rows mention no entity of the table."""
        names = name_table(read_table(self.entity_table), tokenizer)
        for ids, word_ids in row_columns(rows):
            if next(names.find(ids, words_of(ids, word_ids)), None) is not None:
                return self
        raise ValueError(
            f"the text mentions no entity of entity_table={self.entity_table!r}: give a table of names that it has"
        )
