# SPDX-License-Identifier: Apache-2.0
"""Late chunking: one pass reads a long text, and each of its passages gets a vector from the states of its tokens
(Günther et al. 2024, arXiv 2409.04701, section 3).

```python
text = "\\n".join(passages)
ends = list(itertools.accumulate(len(passage) + 1 for passage in passages))
spans = [(end - 1 - len(passage), end - 1) for passage, end in zip(passages, ends)]
[vectors] = late_chunks(model, [text], [spans])  # [passages, D]: each knows what stands around it
```
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..configuration_xformer import XFormerConfig

Span = tuple[int, int]


def pool_spans(states: Tensor, mask: Tensor | None, spans: Sequence[Sequence[Span]]) -> list[Tensor]:
    """The mean state of each span of tokens; gradients pass.

    Args:
        states: [B, T, D].
        mask: [B, T], true or 1 for real tokens, with padding on either side or in between; None: nothing is padded.
        spans: for each row its (start, end), counted in real tokens from the row's first, end excluded. They may
            overlap.

    Returns: for each row a tensor [spans of the row, D].

    Raises `ValueError` for a span that is empty or leaves its row, and where rows or tokens are not as many as states.
    """
    return [
        torch.stack([row[start:end].mean(0) for start, end in own]) if own else row.new_zeros(0, row.shape[-1])
        for row, own in _real_rows(states, mask, spans)
    ]


def late_chunks(
    model: Any,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    *,
    tokenizer: Any = None,
    batch_size: int = 1,
) -> list[Tensor]:
    """A vector for each passage of long texts, each text in one pass of the model, without gradients.

    A token belongs to the passage in which its last character lies. Special tokens before the text go with the passage
    that the first token is in, those after it with that of the last token: a passage that is the whole text has the
    vector that the text has.

    Args:
        model: a `SentenceTransformer`, whose own modules make a vector of a passage's states (mean, dense layers,
            normalization); or an encoder that gives `last_hidden_state`, of which the mean is taken.
        texts: the whole texts; begin them with the prompt if the model wants one.
        spans: for each text its passages as (start, end) in characters, end excluded.
        tokenizer: a fast one, of the encoder; a `SentenceTransformer` has its own.
        batch_size: texts of a pass.

    Returns: for each text a tensor [passages, D], in the order of its spans.

    Raises:
        TypeError: no fast tokenizer, or a `SentenceTransformer` that pools by one token.
        ValueError: a text that is longer than what the model reads, or a span without a token of its text.
    """
    package = sys.modules.get("sentence_transformers")
    sentence = package is not None and isinstance(model, package.SentenceTransformer)
    if sentence:
        tokenizer = tokenizer or model.tokenizer
        mode = getattr(model[1], "pooling_mode", None) if len(model) > 1 else None
        if mode is not None and {"cls", "lasttoken"} & set([mode] if isinstance(mode, str) else mode):
            raise TypeError(f"this model's vectors are states of one token ({mode}); passages need a mean of many.")
    if not getattr(tokenizer, "is_fast", False):
        raise TypeError(f"late_chunks needs a fast tokenizer, which knows a token's place, not {tokenizer!r}.")
    if len(texts) != len(spans):
        raise ValueError(f"{len(texts)} texts have spans for {len(spans)}; give a list of spans for each text.")
    encoder = model[0] if sentence else model
    limit = model.max_seq_length if sentence else getattr(model.config, "max_position_embeddings", None)
    if not sentence and isinstance(model.config, XFormerConfig):
        limit = None  # our models refuse by themselves what is too long for their positions, if those have an end
    elif not sentence and limit is not None:  # RoBERTa has two places less than its table, as its tokenizer knows
        limit = min(limit, tokenizer.model_max_length)
    model.eval()  # as `SentenceTransformer.encode` does
    found: list[Tensor] = []
    for first in range(0, len(texts), batch_size):
        part = list(texts[first : first + batch_size])
        encoded = tokenizer(part, return_offsets_mapping=True, return_special_tokens_mask=True, truncation=False)
        places = [
            _token_spans(first + row, encoded, row, own, limit)
            for row, own in enumerate(spans[first : first + batch_size])
        ]
        offered = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        batch = tokenizer.pad(offered, return_tensors="pt").to(next(model.parameters()).device)
        with torch.no_grad():
            output = encoder(dict(batch)) if sentence else encoder(**batch)
            states = output["token_embeddings"] if sentence else output.last_hidden_state
            mask = batch["attention_mask"]
            found += (
                _by_modules(list(model)[1:], states, mask, places) if sentence else pool_spans(states, mask, places)
            )
    return found


def _real_rows(states: Tensor, mask: Tensor | None, spans: Sequence[Sequence[Span]]) -> list[tuple[Tensor, Any]]:
    """For each row its real states [t, D] and its spans, which are checked."""
    if len(spans) != len(states):
        raise ValueError(f"{len(states)} rows have spans for {len(spans)}; give a list of spans for each row.")
    if mask is not None and mask.shape[1] != states.shape[1]:
        raise ValueError(
            f"there are {states.shape[1]} states for {mask.shape[1]} tokens; passages need an encoder that gives each"
            " token its state."
        )
    rows = list(states) if mask is None else [row[own.bool()] for row, own in zip(states, mask.to(states.device))]
    for place, (row, own) in enumerate(zip(rows, spans)):
        for start, end in own:
            if not 0 <= start < end <= len(row):
                raise ValueError(
                    f"the span ({start}, {end}) of row {place} has to begin before it ends, within {len(row)} tokens."
                )
    return list(zip(rows, spans))


def _by_modules(
    modules: list[nn.Module], states: Tensor, mask: Tensor, spans: Sequence[Sequence[Span]]
) -> list[Tensor]:
    """What sentence-transformers' modules make of each span as if it were a text."""
    found = []
    for row, own in _real_rows(states, mask, spans):
        passages = [row[start:end] for start, end in own] or [row]  # which says how wide a vector is
        features = {
            "token_embeddings": pad_sequence(passages, batch_first=True),
            "attention_mask": pad_sequence([mask.new_ones(len(p)) for p in passages], batch_first=True),
        }
        for module in modules:
            features = module(features)
        found.append(features["sentence_embedding"][: len(own)])
    return found


def _token_spans(text: int, encoded: Any, row: int, spans: Sequence[Span], limit: int | None) -> list[Span]:
    """Spans of characters as spans of tokens, special ones among them."""
    special, offsets = encoded["special_tokens_mask"][row], encoded["offset_mapping"][row]
    if limit is not None and len(special) > limit:
        raise ValueError(
            f"text {text} has {len(special)} tokens and the model reads {limit}; cut it between two passages."
        )
    inner = [place for place, mark in enumerate(special) if not mark]
    found = []
    for start, end in spans:
        own = [place for place in inner if start < offsets[place][1] <= end]
        if not own:
            raise ValueError(f"the span ({start}, {end}) of text {text} has no token; leave it out.")
        begin, stop = own[0], own[-1] + 1
        found.append((0 if begin == inner[0] else begin, len(special) if stop == inner[-1] + 1 else stop))
    return found
