# SPDX-License-Identifier: Apache-2.0
"""BART's denoising (Lewis et al. 2020, section 2.2): five kinds of noise, and a decoder that writes the whole text.

Token masking, token deletion and text infilling are one draw of spans with other settings, as in the released code;
sentence permutation comes before it, insertions and document rotation after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Objective, Row, is_special, plain_ids, register, special_table
from .masked_lm import given_units
from .seq2seq import Seq2SeqCollator

AS_MASK = -1  # in place of a random id: the mask token


@dataclass
class DenoisingNoise:
    """All that is random about a text of n tokens, in the order in which it is applied.

    Args:
        order: [n], the token that comes to each place.
        head: [n] bool, where spans begin, of the text in that order.
        tail: [n] bool, their further tokens.
        heads_as, tails_as: [n], the ids that stand in for them, -1 for the mask token.
        inserted: [k], ascending: places of further tokens in the text that holds them.
        inserted_ids: [k], -1 for the mask token.
        rotation: the token with which the text then begins.
    """

    order: Tensor
    head: Tensor
    tail: Tensor
    heads_as: Tensor
    tails_as: Tensor
    inserted: Tensor
    inserted_ids: Tensor
    rotation: int = 0


def no_noise(length: int) -> DenoisingNoise:
    """Of a text of `length` tokens that stays as it is."""
    none, masks = torch.zeros(length, dtype=torch.bool), torch.full((length,), AS_MASK)
    nothing = torch.zeros(0, dtype=torch.int64)
    return DenoisingNoise(torch.arange(length), none, none.clone(), masks, masks.clone(), nothing, nothing.clone())


def apply_noise(ids: Tensor, noise: DenoisingNoise, replace_length: int, mask_token_id: int) -> Tensor:
    """The noisy text of the text `ids` [n], which holds neither the token that begins a row nor the one that ends it.

    replace_length: what a span becomes, 1 one token, 0 nothing, -1 as many tokens as it has. A span that begins within
    another one is a part of it.
    """
    text = ids[noise.order]
    replaced = noise.head | noise.tail
    if replace_length == -1:
        stand_in = torch.where(noise.tail, noise.tails_as, noise.heads_as)
        kept = torch.ones_like(replaced)
    else:
        stand_in, kept = noise.heads_as, ~noise.tail if replace_length else ~replaced
    stand_in = torch.where(stand_in == AS_MASK, mask_token_id, stand_in)
    text = torch.where(replaced, stand_in, text)[kept]
    if len(noise.inserted):
        longer = text.new_empty(len(text) + len(noise.inserted))
        own = torch.ones(len(longer), dtype=torch.bool)
        own[noise.inserted] = False
        longer[own] = text
        longer[noise.inserted] = torch.where(noise.inserted_ids == AS_MASK, mask_token_id, noise.inserted_ids)
        text = longer
    return torch.cat([text[noise.rotation :], text[: noise.rotation]])


def permute_sentences(ends: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """The token [n] that comes to each place when sentences change places. ends [n] bool: where sentences end; what
    follows the last one is a sentence, too. ratio: share of the sentences that are drawn to be permuted."""
    length = len(ends)
    last = ends.clone()
    last[-1:] = True
    stops = (last.nonzero().squeeze(1) + 1).tolist()
    sentences = [torch.arange(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    drawn = torch.randperm(len(sentences), generator=generator)[: math.ceil(len(sentences) * ratio)]
    order = torch.arange(len(sentences))
    order[drawn] = drawn[torch.randperm(len(drawn), generator=generator)]
    return torch.cat([sentences[index] for index in order.tolist()]) if length else order[:0]


def span_lengths(budget: int, poisson_lambda: float | None, generator: torch.Generator) -> Tensor:
    """Lengths [spans] in words, zeros among them, drawn from the Poisson law until they add up to `budget`; the last
    one is cut to it. None: spans of one word."""
    if poisson_lambda is None or budget == 0:
        return torch.ones(budget, dtype=torch.int64)
    rates, lengths = torch.full((budget,), float(poisson_lambda)), torch.zeros(0, dtype=torch.int64)
    while int(lengths.sum()) < budget:
        lengths = torch.cat([lengths, torch.poisson(rates, generator=generator).long()])
    total = lengths.cumsum(0)
    last = int((total < budget).sum())
    lengths = lengths[: last + 1].clone()
    lengths[last] -= total[last] - budget
    return lengths


def sample_noise(
    starts: Tensor,
    ends: Tensor,
    special: Tensor,
    objective: BartDenoisingObjective,
    vocabulary: Tensor,
    generator: torch.Generator,
) -> DenoisingNoise:
    """Draw the noise of a text of n tokens.

    `starts` [n] bool: the first token of every word. `ends` [n] bool: the last token of every sentence. `special` [n]
    bool: tokens that spans leave alone, such as separators of documents. `vocabulary`: the ids of random replacements.
    """
    length = len(starts)
    noise = no_noise(length)
    if not bool(starts.any()):
        return noise
    if objective.permute_sentences > 0:
        noise.order = permute_sentences(ends, objective.permute_sentences, generator)
        starts, special = starts[noise.order], special[noise.order]
    first = starts.nonzero().squeeze(1)
    words = len(first)
    poisson = objective.poisson_lambda if objective.mask_length == "span-poisson" else None
    lengths = span_lengths(math.ceil(objective.mask_ratio * words), poisson, generator)
    inserts = int((lengths == 0).sum())
    lengths = lengths[lengths > 0]
    word = torch.randperm(words, generator=generator)[: len(lengths)]
    head = first[word]
    as_random = torch.rand(len(head), generator=generator) < objective.random_ratio
    noise.head[head] = True
    stop = torch.cat([first, first.new_tensor([length])])[(word + lengths).clamp(max=words)]
    noise.tail = _covered(head + 1, stop, length) & ~special
    random_ids = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)]
    noise.heads_as[head[as_random]] = random_ids[head[as_random]]
    random_tail = _covered(head[as_random] + 1, stop[as_random], length)
    noise.tails_as = torch.where(random_tail, random_ids, AS_MASK)
    # A text that fills its row must not outgrow it through spans of length 0: there are not more of them than tokens
    # that went.
    replaced = noise.head | noise.tail
    gone = {-1: 0, 0: int(replaced.sum()), 1: int(noise.tail.sum())}[objective.replace_length]
    inserts = min(inserts, gone) + math.ceil(objective.insert_ratio * length)
    if inserts:
        total = length - gone + inserts
        noise.inserted = torch.randperm(total, generator=generator)[:inserts].sort().values
        drawn = vocabulary[torch.randint(len(vocabulary), (inserts,), generator=generator)]
        noise.inserted_ids = torch.where(
            torch.rand(inserts, generator=generator) < objective.random_ratio, drawn, AS_MASK
        )
    rotated = float(torch.rand((), generator=generator)) < objective.rotate_ratio
    if rotated:
        noise.rotation = int(torch.randint(max(length - gone + inserts, 1), (), generator=generator))
    return noise


def _covered(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """Places [length] bool from a start up to its stop."""
    steps = torch.zeros(length + 1, dtype=torch.int64)
    steps.index_add_(0, start, torch.ones_like(start))
    steps.index_add_(0, stop, -torch.ones_like(stop))
    return steps.cumsum(0)[:length] > 0


def sentence_end_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokens that are a full stop, with or without a mark of the space before it."""
    return {index for token, index in tokenizer.get_vocab().items() if token.lstrip("Ġ▁ ").removeprefix("##") == "."}


class BartDenoisingCollator(Seq2SeqCollator):
    """Batches for a sequence-to-sequence model: `input_ids` is the noisy row, `labels` the row as it was.

    Special tokens at the ends of a row stay there, and those within it are never masked.
    """

    objective: BartDenoisingObjective
    columns = ("special_tokens_mask", "unit_ids", "word_ids")

    def __init__(self, objective: BartDenoisingObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        for name, use in (("mask", "stands for spans"), ("sep", "starts the decoder input")):
            if getattr(tokenizer, f"{name}_token_id") is None:
                raise ValueError(f"{type(tokenizer).__name__} has no {name} token, which {use}: add one")
        self.mask_token_id, self.start_token_id = tokenizer.mask_token_id, tokenizer.sep_token_id
        self.special = special_table(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
        self.vocabulary = plain_ids(tokenizer)
        given = objective.sentence_end_ids
        self.sentence_end = special_table(sentence_end_ids(tokenizer) if given is None else set(given))

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor]:
        special = self.special_tokens(row)
        text = (~special).nonzero().squeeze(1)
        if not len(text):
            return row.ids, row.ids
        begin, end = int(text[0]), int(text[-1]) + 1
        ids, special = row.ids[begin:end], special[begin:end]
        starts = ~special
        if self.objective.masks_units:
            units = given_units(row)[begin:end]
            starts[1:] &= (units[1:] != units[:-1]) | special[:-1]
        ends = is_special(ids, self.sentence_end) & ~special
        ends[:-1] &= ~ends[1:]  # a run of full stops ends one sentence
        noise = sample_noise(starts, ends | special, special, self.objective, self.vocabulary, self.generator(row.ids))
        noisy = apply_noise(ids, noise, self.objective.replace_length, self.mask_token_id)
        return torch.cat([row.ids[:begin], noisy, row.ids[end:]]), row.ids


@register("bart_denoising")
class BartDenoisingObjective(Objective):
    """Write a text from which spans were taken, whose sentences were shuffled, or which begins elsewhere.

    Args:
        mask_ratio: share of the words that spans cover; ceil(mask_ratio words), each counted once per span.
        mask_length: what a span is: "span-poisson" so many words, "word" one word, "subword" one token.
        poisson_lambda: mean number of words of a "span-poisson"; a span of no word is a mask that is put in.
        replace_length: what a span becomes: 1 one mask (text infilling; with "subword" token masking), 0 nothing
            (token deletion), -1 a mask for each of its tokens.
        random_ratio: share of the spans in whose place a random token stands instead of the mask.
        insert_ratio: masks put in anywhere, per token of the row.
        rotate_ratio: share of the rows that begin with a random token, what stood before it following at the end.
        permute_sentences: share of a row's sentences that change places.
        sentence_end_ids: tokens that end a sentence; None: the full stops of the tokenizer.
        whole_word: whether spans are counted in words (column `word_ids`); False: every token is a word.
    """

    mask_ratio: float | int = bounded(0.3, least=0, most=1)
    mask_length: Literal["subword", "word", "span-poisson"] = "span-poisson"
    poisson_lambda: float | int = bounded(3.5, above=0)
    replace_length: Literal[-1, 0, 1] = 1
    random_ratio: float | int = bounded(0.1, least=0, most=1)
    insert_ratio: float | int = bounded(0.0, least=0, most=1)
    rotate_ratio: float | int = bounded(0.0, least=0, most=1)
    permute_sentences: float | int = bounded(1.0, least=0, most=1)
    sentence_end_ids: tuple[int, ...] | None = None
    whole_word: bool = True

    summary: ClassVar[str] = "a whole text, of which spans are masked and sentences shuffled (BART)"
    head: ClassVar[str] = "Seq2SeqLM"
    collates = BartDenoisingCollator
    shape = "seq2seq"
    add_special_tokens: ClassVar[bool] = True
    sample_by = "document"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    decoder_starts_with = "sep"

    def check_fields(self) -> None:
        self._require(
            self.mask_length != "subword" or self.replace_length != -1,
            "mask_length='subword' is replaced by one mask or by nothing: set replace_length to 1 or 0",
        )

    @property
    def masks_units(self) -> bool:
        return self.whole_word and self.mask_length != "subword"

    def raw_block_size(self, block_size: int) -> int:
        """Tokens of a row that still fits after the insertions. Raises ValueError where none does."""
        raw = super().raw_block_size(block_size)
        while raw + math.ceil(self.insert_ratio * raw) > block_size:
            raw -= 1
        self._require(raw >= 1, f"block_size={block_size} leaves no room for insertions: take at least 2")
        return raw
