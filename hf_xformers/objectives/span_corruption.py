# SPDX-License-Identifier: Apache-2.0
"""T5 span corruption (Raffel et al. 2020, JMLR 21, sections 3.1.4 and 3.3.4): drop spans, predict them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Objective, Row, register, special_table
from .seq2seq import Seq2SeqCollator


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """(noise tokens q, noise spans s) of a row of n tokens: q = clip(round(density n), 1, n-1), s = round(q / mean).

    A row of one token counts as two, so that both numbers are positive. s never exceeds the number of tokens on
    either side, which matters only for densities above the usual ones.
    """
    length = max(length, 2)
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), length - noise)


def _composition(total: int, parts: int, generator: torch.Generator) -> Tensor:
    """`parts` positive integers with sum `total`, all such lists equally likely (parts - 1 of the total - 1 gaps)."""
    cuts = torch.randperm(total - 1, generator=generator)[: parts - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.zeros(1, dtype=cuts.dtype), append=torch.full((1,), total))


def sample_noise(length: int, density: float, mean_span: float, generator: torch.Generator) -> Tensor:
    """Noise mask [length] bool: spans of text and of noise alternate; the first is text, the last is noise."""
    noise, spans = noise_counts(length, density, mean_span)
    noise_lengths = _composition(noise, spans, generator)
    text_lengths = _composition(max(length, 2) - noise, spans, generator)
    runs = torch.stack([text_lengths, noise_lengths], dim=1).flatten()
    return torch.tensor([False, True]).repeat(spans).repeat_interleave(runs)[:length]


def apply_noise(ids: Tensor, noise: Tensor, sentinels: Tensor, eos_token_id: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of one row, both ending with eos.

    `ids` [n] int64, `noise` [n] bool beginning with text, `sentinels` [S] the ids of sentinel 0, 1, ... In the inputs
    each run of noise becomes the next sentinel; in the targets each run of text does. There is no closing sentinel.
    Raises ValueError if the row has more runs than there are sentinels.
    """
    return _collapse(ids, noise, sentinels, eos_token_id), _collapse(ids, ~noise, sentinels, eos_token_id)


def _collapse(ids: Tensor, drop: Tensor, sentinels: Tensor, eos_token_id: int) -> Tensor:
    """`ids` with each run of `drop` replaced by one sentinel, and eos."""
    first = drop.clone()
    first[1:] &= ~drop[:-1]
    order = first.cumsum(0) - 1
    spans = int(first.sum())
    if spans > len(sentinels):
        raise ValueError(_too_many(spans, len(sentinels)))
    marked = torch.where(first, sentinels[order.clamp(min=0)], ids)
    return torch.cat([marked[first | ~drop], ids.new_tensor([eos_token_id])])


def _too_many(spans: int, sentinels: int) -> str:
    return (
        f"the row has {spans} noise spans for {sentinels} sentinels: shorten the rows, raise mean_noise_span_length, "
        "or raise num_sentinels with a vocabulary that has more of them"
    )


def sentinel_ids(tokenizer: Any, start: int | None, count: int) -> Tensor:
    """Ids of sentinel 0, 1, ...: start, start - 1, ..., or the tokenizer's <extra_id_0>, <extra_id_1>, ... by name.

    Raises ValueError if the tokenizer has no <extra_id_0> and there is no `start`, or if the ids leave the vocabulary.
    """
    if start is not None:
        if not count - 1 <= start < len(tokenizer):
            raise ValueError(
                f"sentinel_start={start} with num_sentinels={count} needs the ids {start - count + 1}..{start}, and "
                f"the vocabulary has 0..{len(tokenizer) - 1}: give a start in that range"
            )
        return torch.arange(start, start - count, -1)
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    while len(ids) < count and f"<extra_id_{len(ids)}>" in vocabulary:
        ids.append(vocabulary[f"<extra_id_{len(ids)}>"])
    if not ids:
        raise ValueError(
            f"{type(tokenizer).__name__} has no <extra_id_0>: add special tokens <extra_id_0>..<extra_id_{count - 1}> "
            f"and resize the embeddings, or set sentinel_start={len(tokenizer) - 1} to give up the last {count} ids"
        )
    return torch.tensor(ids, dtype=torch.int64)


class SpanCorruptionCollator(Seq2SeqCollator):
    """Batches with `input_ids`, `attention_mask` [B, T_in], `labels`, `decoder_input_ids` [B, T_out].

    Special tokens of a feature (`special_tokens_mask`, else by id; the unknown token is text) are taken out before
    the corruption, as T5's rows have none. Decoder rows are padded on the right.
    """

    objective: SpanCorruptionObjective
    columns = ("special_tokens_mask",)

    def __init__(self, objective: SpanCorruptionObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        for name, use in (("eos", "ends the inputs and the targets"), ("pad", "starts the decoder input")):
            if getattr(tokenizer, f"{name}_token_id") is None:
                raise ValueError(f"{type(tokenizer).__name__} has no {name} token, which {use}: add one")
        self.eos_token_id, self.start_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.sentinels = sentinel_ids(tokenizer, objective.sentinel_start, objective.num_sentinels)
        self.special = special_table(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor]:
        special = self.special_tokens(row)
        ids = row.ids[~special]
        spec = self.objective
        noise = sample_noise(len(ids), spec.noise_density, spec.mean_noise_span_length, self.generator(ids))
        return apply_noise(ids, noise, self.sentinels, self.eos_token_id)


@register("span")
class SpanCorruptionObjective(Objective):
    """Replace spans of the input by sentinels and predict the spans.

    Args:
        noise_density: share of tokens that are dropped.
        mean_noise_span_length: mean length of a span, in tokens.
        sentinel_start: id of the first sentinel, the next ones descend; None: the tokenizer's <extra_id_0>, ...
        num_sentinels: how many sentinels there are at most.
    """

    noise_density: float | int = bounded(0.15, above=0, below=1)
    mean_noise_span_length: float | int = bounded(3.0, least=1)
    sentinel_start: int | None = bounded(None, least=0)
    num_sentinels: int = bounded(100, least=1)

    summary: ClassVar[str] = "spans that sentinels stand for (T5)"
    corrupts: ClassVar[str] = "15 % of the tokens, in spans of 3, each a sentinel in the input"
    head: ClassVar[str] = "Seq2SeqLM"
    collates = SpanCorruptionCollator
    shape = "seq2seq"
    preferred: ClassVar[bool] = True
    sample_by = "document"
    tokenizer_style = "t5"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad",)

    def raw_block_size(self, block_size: int) -> int:
        """Raw tokens per row so that the encoder input (text, sentinels, eos) has exactly `block_size` tokens.

        128 -> 141, 512 -> 568. It is the longest such row, so nothing is padded. (With a noise density above .5 some
        sizes cannot be met, and the input is one token short.) Raises ValueError if the row would need more spans than
        `num_sentinels`.
        """
        self._require(block_size >= 3, f"block_size must be at least 3 (text, sentinel, eos), not {block_size}")
        raw = block_size - 1
        while self._lengths(raw + 1)[0] <= block_size:
            raw += 1
        _, spans = noise_counts(raw, self.noise_density, self.mean_noise_span_length)
        if spans > self.num_sentinels:
            raise ValueError(f"with block_size={block_size} {_too_many(spans, self.num_sentinels)}")
        return raw

    def target_length(self, block_size: int) -> int:
        """Tokens of the targets (noise, sentinels, eos) that go with inputs of `block_size`: 128 -> 29, 512 -> 114."""
        return self._lengths(self.raw_block_size(block_size))[1]

    def _lengths(self, raw: int) -> tuple[int, int]:
        noise, spans = noise_counts(raw, self.noise_density, self.mean_noise_span_length)
        return raw - noise + spans + 1, noise + spans + 1
