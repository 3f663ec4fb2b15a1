# SPDX-License-Identifier: Apache-2.0
"""The sentences before a row, for models that translate a sentence of a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ...objectives.base import pad_rows
from ..origin import RowNames, columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

DOCUMENTS = ("document", "doc_id", "document_id", "doc")  # columns that say which document a row is of
_COLUMNS = ("context_input_ids", "decoder_context_input_ids")


@runtime_checkable
class ReadsSentences(Protocol):
    """A stack that reads sentences before the text's own, as inputs of their own."""

    def sentences_before(self) -> int:
        """How many."""


def sentences_before(config: Any) -> int:
    """How many sentences before its own a model of this configuration reads."""
    from ...configuration_xformer import XFormerConfig

    stack = config.stack if isinstance(config, XFormerConfig) else None
    return stack.sentences_before() if isinstance(stack, ReadsSentences) else 0


def document_column(rows: Dataset, taken: Sequence[str | None]) -> str | None:
    """The column that says which document a row is of, none of those that are `taken` by texts."""
    return next((name for name in DOCUMENTS if name in columns_of(rows) and name not in taken), None)


def rows_before(rows: Dataset, count: int, taken: Sequence[str], split: str) -> list[list[int]]:
    """For every row the up to `count` rows before it in its document, the first of them first.

    Documents are told apart by a column of `DOCUMENTS` that is not `taken` by a text; without one, all rows are one
    document in their order. Raises ValueError for a row without its document.
    """
    name = document_column(rows, taken)
    documents = [None] * len(rows) if name is None else list(rows[name])
    where, found = RowNames(rows, split), []
    earlier: dict[Any, list[int]] = {}
    for row, document in enumerate(documents):
        if name is not None and (document is None or document == ""):
            raise ValueError(
                f"{where[row]} has no document in column {name!r}; fill it in, or leave the column out if the rows are"
                " one document in their order"
            )
        before = earlier.setdefault(document, [])
        found.append(before[-count:])
        before.append(row)
    return found


def context_columns(
    before: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]] | None
) -> dict[str, list[list[Sequence[int]]]]:
    """Ids of the rows before each row: of their texts, and of their translations where there are any."""
    columns = {_COLUMNS[0]: [[inputs[index] for index in rows] for rows in before]}
    if targets is not None:
        columns[_COLUMNS[1]] = [[targets[index] for index in rows] for rows in before]
    return columns


class WithContext:
    """A collator that pads the sentences before to [B, K, S], with their masks, besides what another one does. On the
    decoder's side they are shifted right, as it reads them."""

    def __init__(self, collate: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        self.collate, self.count = collate, sentences_before(config)
        self.pad, self.start = tokenizer.pad_token_id or 0, config.decoder_start_token_id
        self.side = getattr(config.stack, "side", "encoder") if self.count else "encoder"

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        batch = self.collate([{k: v for k, v in row.items() if k not in _COLUMNS} for row in features])
        for name in _COLUMNS:
            if self.count and name in features[0] and not (name.startswith("decoder") and self.side == "encoder"):
                texts = [row[name] for row in features]
                if name.startswith("decoder"):
                    texts = [[[self.start, *ids[:-1]] for ids in row] for row in texts]
                ids, mask = self._padded(texts)
                batch[name], batch[name.replace("input_ids", "attention_mask")] = ids, mask
        return batch

    def _padded(self, texts: Sequence[Sequence[Sequence[int]]]) -> tuple[Tensor, Tensor]:
        missing: list[Sequence[int]] = [[]]
        flat = [ids for row in texts for ids in [*missing * (self.count - len(row)), *row]]
        tensors = [torch.as_tensor(ids, dtype=torch.long) for ids in flat]
        length = max(1, *map(len, tensors))
        ids = pad_rows(tensors, self.pad, length)
        mask = pad_rows([torch.ones_like(row) for row in tensors], 0, length)
        return ids.view(len(texts), self.count, -1), mask.view(len(texts), self.count, -1)
