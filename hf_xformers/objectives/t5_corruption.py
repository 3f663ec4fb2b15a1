# SPDX-License-Identifier: Apache-2.0
"""The corruptions that T5 was compared with (Raffel et al. 2020, JMLR 21, section 3.3, table 3), next to its own.

Prefix language modeling, BERT's and MASS's noise, deshuffling, and tokens that are drawn one by one and replaced or
dropped. T5's own objective, spans of a given mean length, is `span`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Objective, Row, plain_ids, register, special_table
from .seq2seq import Seq2SeqCollator
from .span_corruption import apply_noise as replace_spans
from .span_corruption import sentinel_ids


@dataclass
class CorruptionNoise:
    """All that is random about a text of n tokens: `noise` [n] bool; `random_ids` [n], in place of noise, -1 where a
    sentinel stands; `order` [n], the token that comes to each place."""

    noise: Tensor
    random_ids: Tensor
    order: Tensor


def sample_noise(
    length: int, objective: T5CorruptionObjective, vocabulary: Tensor, sentinels: int, generator: torch.Generator
) -> CorruptionNoise:
    """Draw the noise of a text of `length` tokens.

    Every token is noise with probability `noise_density`, one at least; one token at least is not, of two or more.
    "prefix_lm": the first 1 to n - 1 tokens are no noise, the others are. `sentinels`: how many there are,;
    where each run has one of its own; what would be runs beyond them stays text.
    """
    corruption = objective.corruption
    order, random_ids = torch.arange(length), torch.full((length,), -1)
    noise = torch.zeros(length, dtype=torch.bool)
    if length == 0:
        return CorruptionNoise(noise, random_ids, order)
    if corruption == "prefix_lm":
        prefix = int(torch.randint(1, length, (), generator=generator)) if length > 1 else 0
        return CorruptionNoise(order >= prefix, random_ids, order)
    if corruption == "deshuffle":
        return CorruptionNoise(~noise, random_ids, torch.randperm(length, generator=generator))
    draw = torch.rand(length, generator=generator, dtype=torch.float64)
    noise = draw < objective.noise_density
    if not bool(noise.any()):
        noise[draw.argmin()] = True
    if length > 1 and bool(noise.all()):
        noise[draw.argmax()] = False
    if corruption == "bert_style":
        as_random = torch.rand(length, generator=generator, dtype=torch.float64) < objective.random_prob
        ids = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)]
        random_ids = torch.where(as_random, ids, -1)
    if corruption == "iid_denoise":
        first = noise.clone()
        first[1:] &= ~noise[:-1]
        noise = noise & (first.cumsum(0) < max(sentinels, 2))  # there may be one more run of text than of noise
    return CorruptionNoise(noise, random_ids, order)


def apply_noise(
    ids: Tensor, noise: CorruptionNoise, corruption: str, sentinels: Tensor, eos_token_id: int
) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of the text `ids` [n], both ending with eos."""
    if corruption == "iid_denoise":
        return replace_spans(ids, noise.noise, sentinels, eos_token_id)
    inputs, targets = ids[noise.order], ids
    if corruption in ("prefix_lm", "drop_tokens"):
        inputs, targets = ids[~noise.noise], ids[noise.noise]
    elif corruption != "deshuffle":
        stand_in = torch.where(noise.random_ids >= 0, noise.random_ids, sentinels[0])
        inputs = torch.where(noise.noise, stand_in, ids)
    eos = ids.new_tensor([eos_token_id])
    return torch.cat([inputs, eos]), torch.cat([targets, eos])


class T5CorruptionCollator(Seq2SeqCollator):
    """Batches for a sequence-to-sequence model. Special tokens of a feature are taken out before the corruption."""

    objective: T5CorruptionObjective
    columns = ("special_tokens_mask",)

    def __init__(self, objective: T5CorruptionObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        for name, use in (("eos", "ends the inputs and the targets"), ("pad", "starts the decoder input")):
            if getattr(tokenizer, f"{name}_token_id") is None:
                raise ValueError(f"{type(tokenizer).__name__} has no {name} token, which {use}: add one")
        self.eos_token_id, self.start_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.sentinels = torch.zeros(0, dtype=torch.int64)
        if objective.num_sentinels:
            self.sentinels = sentinel_ids(tokenizer, objective.sentinel_start, objective.num_sentinels)
        self.special = special_table(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
        ids = plain_ids(tokenizer)
        self.vocabulary = ids[~torch.isin(ids, self.sentinels)]

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor]:
        special = self.special_tokens(row)
        ids, spec = row.ids[~special], self.objective
        noise = sample_noise(len(ids), spec, self.vocabulary, len(self.sentinels), self.generator(ids))
        return apply_noise(ids, noise, spec.corruption, self.sentinels, self.eos_token_id)


@register("t5_corruption")
class T5CorruptionObjective(Objective):
    """Restore a text from one of the corruptions that T5's authors compared; theirs in the end is `span`.

    Args:
        corruption: "prefix_lm": the encoder reads the beginning of a text, the decoder writes the rest;
            "bert_style": tokens are masked or replaced at random, the whole text is written;
            "mass_style": tokens are masked, the whole text is written;
            "iid_denoise": each run of drawn tokens becomes a sentinel; what stood there is written;
            "drop_tokens": drawn tokens are left out and written;
            "deshuffle": all tokens are shuffled, the text is written.
        noise_density: probability of a token to be drawn; of no meaning for "prefix_lm" and "deshuffle".
        random_prob: share of the drawn tokens in whose place a random one stands, in "bert_style".
        sentinel_start: id of the first sentinel, the next ones descend; None: the tokenizer's <extra_id_0>, ...
        max_sentinels: how many sentinels "iid_denoise" has at most; a single one masks tokens in the other
            corruptions.
    """

    corruption: Literal["prefix_lm", "bert_style", "mass_style", "iid_denoise", "drop_tokens", "deshuffle"] = (
        "iid_denoise"
    )
    noise_density: float | int = bounded(0.15, above=0, below=1)
    random_prob: float | int = bounded(0.1, least=0, most=1)
    sentinel_start: int | None = bounded(None, least=0)
    max_sentinels: int = bounded(100, least=2)

    summary: ClassVar[str] = "the other corruptions of T5: a prefix, shuffled, masked or dropped tokens"
    head: ClassVar[str] = "Seq2SeqLM"
    collates = T5CorruptionCollator
    shape = "seq2seq"
    sample_by = "document"
    tokenizer_style = "t5"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad",)

    @property
    def num_sentinels(self) -> int:
        return {"iid_denoise": self.max_sentinels, "bert_style": 1, "mass_style": 1}.get(self.corruption, 0)

    def raw_block_size(self, block_size: int) -> int:
        """Tokens of a text whose inputs and targets fit into `block_size` whatever is drawn.

        Raises ValueError where runs of noise are expected to be more than there are sentinels.
        """
        self._require(block_size >= 3, f"block_size must be at least 3 (text, sentinel, eos), not {block_size}")
        raw = block_size - (2 if self.corruption == "iid_denoise" else 1)
        runs = math.ceil(raw * self.noise_density * (1 - self.noise_density))
        if self.corruption == "iid_denoise" and runs > self.max_sentinels:
            raise ValueError(
                f"block_size={block_size} gives about {runs} runs of noise for {self.max_sentinels} sentinels: take"
                " shorter rows, or raise max_sentinels with a vocabulary that has more of them"
            )
        return raw
