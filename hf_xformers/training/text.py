# SPDX-License-Identifier: Apache-2.0
"""From a text source to rows of tokens, as `pretrain` and `evaluate` need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..objectives import Objective
from ..objectives.sentence_pairs import SentencePairObjective, sentence_pairs
from ..objectives.translation_lm import Multilingual

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import PreTrainedTokenizerBase


@dataclass
class TextData:
    """Where text comes from; see `hf_xformers.data.load_text_dataset`."""

    _argument_group_name = "data"

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": (
                "'stdlib' (documentation that comes with Python), files, a folder, or a Hub dataset id; of parallel"
                " text 'phrases' (English and German, made by rule), files that end in the languages or what their"
                " names begin with, or rows with a column for each. Default: stdlib, or phrases."
            )
        },
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    data_split: str | None = field(
        default=None, metadata={"help": "Use only this split of the source, also a slice such as 'train[:10%%]'."}
    )
    text_column: str | None = field(default=None, metadata={"help": "Column that holds the text."})
    sample_by: str | None = field(
        default=None,
        metadata={
            "help": (
                "One document of a text file: a 'line', a 'paragraph', or the file ('document'). Default: the file,"
                " with its line breaks, for causal models and span corruption; a paragraph for pairs of sentences; a"
                " line for masked tokens."
            )
        },
    )
    validation_fraction: float = field(
        default=0.05,
        metadata={
            "help": (
                "Share of the documents that is held out where the source has no validation split; of a single one, or"
                " of a few whole files, the last part of each."
            )
        },
    )
    encoding: str = field(default="utf-8", metadata={"help": "Of files of text, such as latin-1."})
    streaming: bool = field(
        default=False,
        metadata={
            "help": (
                "Read the source as a stream, without preparing it on disk first. Needs --max_steps. An evaluation"
                " reads the first few hundred of the texts that are held out."
            )
        },
    )
    num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the data."})

    def named_for(self, objective: Objective | None) -> TextData:
        """With the embedded text that suits the objective, where no data is named."""
        if self.data:
            return self
        parallel = objective is not None and objective.rows == "parallel"
        return dataclasses.replace(self, data=["phrases" if parallel else "stdlib"])


# Of a stream: documents that a tokenizer is trained on, until they have so many characters, rows among which the next
# one is drawn, and documents of an evaluation, which would else read the whole source to find all that are held out.
STREAM_TOKENIZER_DOCUMENTS = 20_000
STREAM_TOKENIZER_CHARACTERS = 200_000_000
STREAM_SHUFFLE_ROWS = 10_000
STREAM_VALIDATION_DOCUMENTS = 500


def load_splits(source: TextData, objective: Objective | None = None) -> DatasetDict:
    """The splits `train` and, unless `validation_fraction` is 0, `validation`, with the column `text`, and of parallel
    text `translation`.

    objective: decides what a document is where `source.sample_by` does not, and whether text is parallel.
    """
    from ..data import load_text_dataset
    from ..data.delimited import reading_as

    source = source.named_for(objective)
    if isinstance(objective, Multilingual):
        from ..data.parallel import load_parallel_dataset

        for name in ("streaming", "text_column"):
            if getattr(source, name):
                raise ValueError(f"--{name} is not for pairs of translations; leave --{name} out")
        with reading_as(source.encoding):
            return load_parallel_dataset(
                source.data,
                objective.languages,
                split=source.data_split,
                config_name=source.data_config,
                validation_fraction=source.validation_fraction,
            )
    with reading_as(source.encoding):
        return load_text_dataset(
            source.data[0] if len(source.data) == 1 else source.data,
            split=source.data_split,
            text_column=source.text_column,
            config_name=source.data_config,
            streaming=source.streaming,
            validation_fraction=source.validation_fraction,
            sample_by=source.sample_by or (objective or Objective).sample_by,  # type: ignore[arg-type]
            num_proc=source.num_proc,
        )


def train_tokenizer_for(
    objective: Objective, texts: Any, *, kind: str, vocab_size: int, max_length: int | None
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on `texts`, with the special tokens and the layout that the objective's rows have."""
    from datasets import IterableDataset

    from ..data import train_tokenizer

    if isinstance(texts, IterableDataset):
        texts = list(_first_texts(texts))
    elif objective.rows == "parallel":
        texts = [*texts["text"], *texts["translation"]]
    return train_tokenizer(
        texts,
        kind=kind,  # type: ignore[arg-type]
        vocab_size=vocab_size,
        num_sentinels=objective.num_sentinels,
        style=objective.tokenizer_style,
        model_max_length=max_length,
    )


def _first_texts(stream: Any) -> Iterator[str]:
    characters = 0
    for row in stream.take(STREAM_TOKENIZER_DOCUMENTS):
        yield row["text"]
        characters += len(row["text"])
        if characters >= STREAM_TOKENIZER_CHARACTERS:
            return


def open_tokenizer(name: str, objective: Objective) -> PreTrainedTokenizerBase:
    """A saved tokenizer with the special tokens that the objective needs, added where it lacks them."""
    from ..data import load_tokenizer

    return load_tokenizer(name, add_missing=objective.needed_tokens, num_sentinels=objective.num_sentinels)


def make_rows(
    texts: Any,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    block_size: int,
    *,
    whole: bool,
    num_proc=None,
) -> Any:
    """Rows of `input_ids` (and `word_ids`, for whole words) from which the objective makes inputs of `block_size`.

    whole: keep the tail that does not fill a row; it is kept as well when there is no other row. A stream gives a
    stream.

    Raises ValueError when the text gives no row at all.
    """
    from datasets import IterableDataset

    from ..data import pack, tokenize_dataset

    length = objective.raw_block_size(block_size)
    if objective.rows == "sentences":
        from ..data.sentences import document_rows

        longest, words = objective.sentence_length(block_size), objective.masks_units
        return document_rows(texts, tokenizer, length, longest, words=words, num_proc=num_proc)
    if isinstance(objective, Multilingual):
        from .parallel_rows import parallel_rows

        return parallel_rows(texts, tokenizer, objective, length, num_proc=num_proc)
    if isinstance(objective, SentencePairObjective):
        from ..data.sentences import sentence_documents

        cut = dataclasses.replace(objective, max_seq_length=min(length, objective.max_seq_length))
        return sentence_pairs(sentence_documents(texts, num_proc=num_proc), tokenizer, cut, num_proc=num_proc)
    words = objective.masks_units
    dressed = objective.add_special_tokens and tokenizer.num_special_tokens_to_add() > 0
    tokens = tokenize_dataset(texts, tokenizer, word_ids=words, num_proc=num_proc)
    for keep_remainder in (True,) if whole else (False, True):
        rows = pack(
            tokens,
            length,
            tokenizer=tokenizer,
            add_special_tokens=dressed,
            word_ids=words,
            keep_remainder=keep_remainder,
            num_proc=num_proc,
        )
        if isinstance(rows, IterableDataset) or len(rows):
            return rows
    raise ValueError("the text gives no row of tokens; give more text")
