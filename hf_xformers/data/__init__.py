# SPDX-License-Identifier: Apache-2.0
"""Text in, rows of tokens out: an embedded corpus, sources, tokenizers, packing, batching and synthetic tasks.

    splits = load_text_dataset("stdlib")                         # or a file, a folder, a glob, a Hub id
    tokenizer = train_tokenizer(splits["train"], vocab_size=8192)  # or load_tokenizer(name)
    rows = pack(tokenize_dataset(splits, tokenizer), 512, tokenizer=tokenizer)

`datasets`, `tokenizers` and `transformers` are imported by the functions that need them, not by this package.
"""

from .batching import LengthGroupedBatchSampler, token_budget_batches
from .packing import pack
from .sources import load_text_dataset
from .stdlib_corpus import STDLIB_CORPUS_ID, StdlibDocument, stdlib_corpus, stdlib_documents
from .synthetic import (
    associative_recall,
    byte_dataset,
    copy_task,
    disjoint,
    list_operations,
    needle_retrieval,
    state_tracking,
    two_hop_recall,
)
from .tokenizer import check_tokenizer, load_tokenizer, sentinel_ids, train_tokenizer, vocabulary_fields
from .tokenizing import document_lengths, tokenize_dataset

__all__ = [
    "STDLIB_CORPUS_ID",
    "LengthGroupedBatchSampler",
    "StdlibDocument",
    "associative_recall",
    "byte_dataset",
    "check_tokenizer",
    "copy_task",
    "disjoint",
    "document_lengths",
    "list_operations",
    "load_text_dataset",
    "load_tokenizer",
    "needle_retrieval",
    "pack",
    "sentinel_ids",
    "state_tracking",
    "stdlib_corpus",
    "stdlib_documents",
    "token_budget_batches",
    "tokenize_dataset",
    "train_tokenizer",
    "two_hop_recall",
    "vocabulary_fields",
]
