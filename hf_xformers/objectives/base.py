# SPDX-License-Identifier: Apache-2.0
"""What every pretraining objective shares: the spec, its registry, and a data collator whose noise is keyed by row.

An objective is a small strict dataclass (its fields are the settings of the paper). It makes a data collator, and it
says how the rows for that collator are cut. The work of a collator is split in two functions per objective:
`sample_noise` draws everything random from a `torch.Generator`, `apply_noise` is pure. A file that is dropped into
this folder is found by itself.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import numpy as np
import torch
from torch import Tensor

from ..core.specs import Catalog, Registry, TypedSpec, aliased, build_in, check_types, register_in

IGNORE_INDEX = -100  # label of a position that is no target

AnyObjective = TypeVar("AnyObjective", bound="Objective")
AnyCollator = TypeVar("AnyCollator", bound="SeededCollator")

# Per-token columns that travel with the ids into the batch, and the value they take at padding.
TOKEN_COLUMNS = {"token_type_ids": 0, "position_ids": 0}


@dataclass(frozen=True, kw_only=True)
class Objective(TypedSpec):
    """Base of all objectives.

    A subclass declares typed fields, the settings of the paper, is registered with [`register`], and names its
    collator. What the commands have to know about it stands in the class variables below.

    Attributes:
        id: its name in `OBJECTIVES`, set by `register`.
        summary: what it predicts, in one line.
        corrupts: what it does to the text that the model reads, in one line; empty: nothing.
        head: the head of a family that it trains, as in `<Family>For<head>`; settings may choose another one for an
            instance.
        collates: the class of its data collator, unless `collator` makes another.
        component: (slot, name) of a component that it needs besides; None: none.
        shape: what kind of model that is.
        preferred: whether it is what a model of this shape is trained on where nobody says.
        rows: what its rows are made of, which the data code serves: `blocks`, tokens packed to equal length;
            `sentences`, whole sentences of one document, with `sentence_ids`; `segment_pairs`, two segments of
            documents that are cut in sentences, with `token_type_ids`; `parallel`, texts in two languages, with
            `langs`; `images`.
        target: what reports call one of the things it predicts.
        rows_at_once: how many rows a batch needs at least, over all processes.
        add_special_tokens: whether rows are wrapped in `special_tokens(tokenizer)`.
        sample_by: what one document of a text file is: models that generate need its line breaks, pairs of segments
            documents of several sentences.
        tokenizer_style: whose special tokens and layout a tokenizer gets that is trained for it.
        needed_tokens: the roles among pad, cls, sep and mask that another tokenizer is given where it lacks them.
        decoder_starts_with: the role of the token that a decoder's text begins with.
    """

    id: ClassVar[str]
    summary: ClassVar[str] = ""
    corrupts: ClassVar[str] = ""
    head: ClassVar[str]
    collates: ClassVar[type[Collator]]
    component: ClassVar[tuple[str, str] | None] = None
    shape: ClassVar[Literal["encoder", "decoder", "seq2seq"]] = "encoder"
    preferred: ClassVar[bool] = False
    rows: ClassVar[Literal["blocks", "sentences", "segment_pairs", "parallel", "images"]] = "blocks"
    target: ClassVar[Literal["token", "label", "patch"]] = "token"
    rows_at_once: ClassVar[int] = 1
    add_special_tokens: ClassVar[bool] = False
    sample_by: ClassVar[Literal["line", "paragraph", "document"]] = "line"
    tokenizer_style: ClassVar[Literal["bert", "gpt", "t5"]] = "bert"
    needed_tokens: ClassVar[tuple[str, ...]] = ()
    decoder_starts_with: ClassVar[Literal["pad", "cls", "sep"]] = "pad"

    def __post_init__(self) -> None:
        check_types(self)
        self.check_values()

    @property
    def masks_units(self) -> bool:
        """Whether noise falls on whole words, so that rows need `word_ids`."""
        return False

    @property
    def num_sentinels(self) -> int:
        """How many `<extra_id_i>` the tokenizer has to have."""
        return 0

    def collator(
        self, tokenizer: Any, *, seed: int = 0, pad_to_multiple_of: int | None = None, static: bool = False
    ) -> Collator:
        """The data collator of this objective; with `static=True` (evaluation) its noise ignores the epoch. Raises
        ValueError for a tokenizer without what the noise needs."""
        return self.collates(self, tokenizer, seed=seed, pad_to_multiple_of=pad_to_multiple_of, static=static)

    def fitted(self, rows: Any, tokenizer: Any) -> Objective:
        """The objective with what it has to know of the training rows; most know nothing. Raises ValueError for rows
        that it cannot train on."""
        return self

    def config_fields(self) -> dict[str, Any]:
        """Fields of a model's config that this objective decides; of the settings under `pretraining` those that it
        names."""
        return {}

    def component_fields(self) -> dict[str, dict[str, Any]]:
        """Fields of components of a new model that this objective decides, by slot."""
        return {}

    def bound_to(self: AnyObjective, config: Any) -> AnyObjective:
        """The objective as the model with this config is trained on it. Raises ValueError where they do not fit."""
        return self

    def raw_block_size(self, block_size: int) -> int:
        """Length of the rows (special tokens included) to hand to the collator for model inputs of `block_size`."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        return block_size

    def target_length(self, block_size: int) -> int:
        """Tokens of the targets that go with model inputs of `block_size`."""
        return block_size

    def sentence_length(self, block_size: int) -> int:
        """Tokens of a sentence at most, where rows are `sentences` of documents."""
        return block_size

    def special_tokens(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        """Ids to put before and after the text of each row; counted in `raw_block_size`."""
        if not self.add_special_tokens:
            return [], []
        start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        return ([] if start is None else [start]), ([] if end is None else [end])

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")


_REGISTRY: Registry[Objective] = Registry("objective", room="objectives")
OBJECTIVES: Mapping[str, type[Objective]] = Catalog(_REGISTRY)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(aliased,))
def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[type[AnyObjective]], type[AnyObjective]]:
    """Class decorator: makes `cls` a frozen dataclass with checked fields and enters it in `OBJECTIVES` as `name`."""

    def enter(cls: type[AnyObjective]) -> type[AnyObjective]:
        cls = register_in(_REGISTRY, cls, name, aliases, frozen=True)  # type: ignore[arg-type]
        cls.id = name
        return cls

    return enter


def build_objective(value: str | Mapping[str, Any] | Objective) -> Objective:
    """An objective from its id, from `{"type": id, **fields}`, or as it is.

    Raises ValueError for an unknown id or field (the message lists the valid ones), TypeError for other types.
    """
    return build_in(_REGISTRY, value, "objective")


@dataclass
class Row:
    """One feature without its padding: `ids` [n], further per-token columns [n], and the length it came with."""

    ids: Tensor
    columns: dict[str, Tensor]
    width: int

    def __len__(self) -> int:
        return self.ids.numel()


def _column(value: Any, name: str) -> Tensor:
    """A feature column as an int64 tensor [n]; a missing entry (None in `word_ids`) becomes -1."""
    if isinstance(value, Tensor):
        tensor = value.to(torch.int64)
    else:
        array = np.asarray(value)
        if array.dtype == object:
            array = np.asarray([-1 if item is None else item for item in value])
        elif array.dtype.kind == "f" and array.size:  # datasets turns integers with nulls into floats with nan
            array = np.where(np.isnan(array), -1, array)
        tensor = torch.from_numpy(np.array(array, dtype=np.int64))
    if tensor.dim() != 1:
        raise ValueError(f"feature column {name!r} has shape {tuple(tensor.shape)}: give one row of ids per feature")
    return tensor


def read_row(feature: Mapping[str, Any], names: Sequence[str]) -> Row:
    """The ids and the columns in `names` that the feature has, with positions of attention 0 taken out."""
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        raise TypeError(
            f"a feature must be a dict with 'input_ids', not {type(feature).__name__} "
            f"{list(feature) if isinstance(feature, Mapping) else ''}: tokenize the dataset first"
        )
    ids = _column(feature["input_ids"], "input_ids")
    columns = {name: _column(feature[name], name) for name in names if feature.get(name) is not None}
    keep = None if feature.get("attention_mask") is None else _column(feature["attention_mask"], "attention_mask")
    checked = columns if keep is None else columns | {"attention_mask": keep}
    for name, column in checked.items():
        if len(column) != len(ids):
            raise ValueError(f"feature column {name!r} has {len(column)} entries for {len(ids)} input_ids")
    width = len(ids)
    if keep is not None and not bool(keep.all()):
        keep = keep.bool()
        ids, columns = ids[keep], {name: column[keep] for name, column in columns.items()}
    return Row(ids, columns, width)


def round_up(length: int, multiple: int | None) -> int:
    """The smallest multiple that holds `length`."""
    return length if multiple is None else -(-length // multiple) * multiple


def pad_rows(rows: Sequence[Tensor], value: int, length: int, side: str = "right") -> Tensor:
    """Stack rows [n_i] to [B, length], filled with `value` on the given side."""
    out = torch.full((len(rows), length), value, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        if side == "left":
            out[index, length - len(row) :] = row
        else:
            out[index, : len(row)] = row
    return out


def special_table(ids: Collection[int]) -> Tensor:
    """A table for `is_special`: one bool per id, and one more for all ids above. (torch.isin is ten times as slow.)"""
    table = torch.zeros(max(ids, default=-1) + 2, dtype=torch.bool)
    table[list(ids)] = True
    return table


def is_special(ids: Tensor, table: Tensor) -> Tensor:
    """Which of `ids` [n] are special; what counts when a feature brings no `special_tokens_mask`."""
    return table[ids.clamp(max=len(table) - 1)]


def plain_ids(tokenizer: Any) -> Tensor:
    """The ids [n] of a tokenizer's vocabulary that are not special tokens, ascending.

    Raises:
        ValueError: there are none.
    """
    ids = torch.tensor(sorted(set(tokenizer.get_vocab().values())), dtype=torch.int64)
    ids = ids[~is_special(ids, special_table(set(tokenizer.all_special_ids)))]
    if not len(ids):
        raise ValueError(f"{type(tokenizer).__name__} has only special tokens: train it on text")
    return ids


class SeededCollator:
    """Base of collators whose batches depend on a seed, the epoch and the rows alone.

    The epoch lives in shared memory: `set_epoch` reaches workers that persist over epochs. Call it between epochs.
    """

    def __init__(self, seed: int = 0, static: bool = False) -> None:
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an int, not {seed!r}")
        self.seed = seed
        self.static = static
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch.share_memory_()  # a plain pickle carries only the value; no effect if memory is shared already

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose noise the next batches get; see `training.EpochCallback`."""
        self._epoch.fill_(int(epoch))

    def as_static(self: AnyCollator) -> AnyCollator:
        """The same collator for evaluation: what it does to a row does not change from epoch to epoch."""
        twin = copy.copy(self)
        twin.static = True
        return twin


class Collator(SeededCollator):
    """Turns features (dicts of one row each) into a batch of tensors; works in `Trainer` and in DataLoader workers.

    The generator of a row is seeded by a hash of (seed, epoch, ids of the row without padding). So the noise of a row
    does not depend on its neighbors, on the number of workers or ranks, or on where training was resumed.
    Two rows with equal ids get equal noise within an epoch.

    Trainer drops the columns that the model does not take. When the collator needs one of them (`unit_ids`,
    `word_ids`, `special_tokens_mask`), set `remove_unused_columns=False`; the collator itself returns only what
    a model takes.
    """

    columns: tuple[str, ...] = tuple(TOKEN_COLUMNS)  # what is read from a feature besides ids and attention mask
    period: int | None = None  # number of different noises of a row; None: a new one in every epoch

    def __init__(
        self,
        objective: Objective,
        tokenizer: Any,
        *,
        seed: int = 0,
        pad_to_multiple_of: int | None = None,
        static: bool = False,
    ) -> None:
        super().__init__(seed, static)
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1 or None, not {pad_to_multiple_of}")
        self.objective = objective
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of
        # Padding is told by the attention mask, so a tokenizer without a pad token can use any id.
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.pad_token_id = pad if pad is not None else eos if eos is not None else 0
        self.padding_side = getattr(tokenizer, "padding_side", "right")

    @functools.cached_property
    def special(self) -> Tensor:
        """What is special where a feature does not say it, for `is_special`."""
        return special_table(set(self.tokenizer.all_special_ids))

    def special_tokens(self, row: Row) -> Tensor:
        """Which tokens [n] of a row are special."""
        given = row.columns.get("special_tokens_mask")
        return is_special(row.ids, self.special) if given is None else given.bool()

    def generator(self, ids: Tensor) -> torch.Generator:
        """The generator of the row `ids` [n] in the current epoch."""
        epoch = 0 if self.static else self.epoch if self.period is None else self.epoch % self.period
        return keyed_generator(self.seed, epoch, ids)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not features:
            raise ValueError("the batch has no features: give at least one")
        batch = self.collate([read_row(feature, self.columns) for feature in features])
        if "position_ids" in batch and restarts(batch["position_ids"], batch["attention_mask"]):
            # Without a mask a model reads restarting positions as documents to keep apart, each padded token one of
            # its own.
            del batch["attention_mask"]
        return batch

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        raise NotImplementedError

    def pad_inputs(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and the columns of TOKEN_COLUMNS that all rows have, each [B, T] int64."""
        # Rows that came padded to a fixed length keep it, so static shapes survive.
        length = round_up(max(row.width for row in rows), self.pad_to_multiple_of)

        def padded(values: Sequence[Tensor], fill: int) -> Tensor:
            return pad_rows(values, fill, length, self.padding_side)

        batch = {
            "input_ids": padded([row.ids for row in rows], self.pad_token_id),
            "attention_mask": padded([torch.ones_like(row.ids) for row in rows], 0),
        }
        for name, fill in TOKEN_COLUMNS.items():
            if all(name in row.columns for row in rows):
                batch[name] = padded([row.columns[name] for row in rows], fill)
        return batch


def restarts(position_ids: Tensor, attention_mask: Tensor) -> bool:
    """Whether a row's real tokens are of several documents: positions [B, T] that do not continue by one."""
    both = attention_mask[:, 1:].bool() & attention_mask[:, :-1].bool()
    return bool((both & (position_ids[:, 1:] != position_ids[:, :-1] + 1)).any())


def keyed_generator(seed: int, epoch: int, ids: Tensor) -> torch.Generator:
    """A CPU generator seeded by blake2b(seed, epoch, ids)."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, epoch), digest_size=8)
    digest.update(ids.contiguous().numpy().astype("<i8", copy=False).tobytes())
    return torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little", signed=True))
