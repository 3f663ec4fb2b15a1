# SPDX-License-Identifier: Apache-2.0
"""A text as sentences of words: where each token stands, and the state bundles of both levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.call import Call
from ..core.prepared import Prepared, State
from ..ops.common.constants import constant
from ..ops.common.real_tokens import real_places
from ..position.base import Position


class SentencePositions(State):
    """The vectors of the places of sentences in a text, [1, S, D]."""

    rows: Tensor


@dataclass
class Nesting:
    """How the tokens of a text stand in sentences: S sentences of at most W words.

    Args:
        slot: [B, T] place of each token among the S * W places of its row (padding: S * W).
        source: [B, S * W] the token of each place (T: none). Both None if places and tokens are the same, in order.
        words: [B, S, W] boolean, which places hold a token.
        whole: whether all do.
    """

    sentences: int
    width: int
    slot: Tensor | None
    source: Tensor | None
    words: Tensor
    whole: bool

    @property
    def filled(self) -> Tensor:
        """[B, S]: which sentences have a word."""
        return self.words.any(-1)

    def nest(self, tokens: Tensor) -> Tensor:
        """[B, T, D] -> [B * S, W, D], zeros where there is no word."""
        batch, length, size = tokens.shape
        places = self.sentences * self.width
        if self.source is None:
            nested = F.pad(tokens, (0, 0, 0, places - length)) if places > length else tokens
        else:
            padded = F.pad(tokens, (0, 0, 0, 1))
            nested = padded.gather(1, self.source.unsqueeze(-1).expand(-1, -1, size))
        return nested.reshape(batch * self.sentences, self.width, size)

    def flatten(self, nested: Tensor, length: int) -> Tensor:
        """[B * S, W, D] -> [B, T, D], zeros at padding."""
        size = nested.shape[-1]
        places = nested.reshape(-1, self.sentences * self.width, size)
        if self.slot is None:
            return places[:, :length]
        return F.pad(places, (0, 0, 0, 1)).gather(1, self.slot.unsqueeze(-1).expand(-1, -1, size))


def check_sentence_ids(sentence_ids: Tensor | None, batch: int, length: int) -> None:
    """Raises `ValueError` for anything but a number for each token, [B, T], or None."""
    if sentence_ids is not None and sentence_ids.shape != (batch, length):
        raise ValueError(
            f"`sentence_ids` must be [batch, length] = {[batch, length]}, the number of each token's sentence, got"
            f" {list(sentence_ids.shape)}."
        )


def make_nesting(like: Tensor, padding_mask: Tensor | None, sentence_ids: Tensor | None, width: int) -> Nesting:
    """Cuts texts into sentences of at most `width` words.

    like: [B, T, ...]. padding_mask: [B, T] boolean or None; padding is in no sentence, wherever it is. sentence_ids:
    [B, T] integers; a sentence ends where the number changes from one real token to the next, and every `width` words
    in it. Without them, sentences are `width` words long.
    """
    batch, length = like.shape[:2]
    check_sentence_ids(sentence_ids, batch, length)
    device = like.device
    order = torch.arange(length, device=device)
    if padding_mask is None and sentence_ids is None:
        count = -(-length // width)
        words = (torch.arange(count * width, device=device) < length).view(1, count, width).expand(batch, -1, -1)
        return Nesting(count, width, None, None, words, whole=count * width == length)
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if padding_mask is None else padding_mask
    rank = real_places(real)
    if sentence_ids is None:
        sentence, word, count = rank // width, rank % width, -(-length // width)
    else:
        last = torch.where(real, order, -1).cummax(-1).values  # the last real token up to here
        before = F.pad(last[:, :-1], (1, 0), value=-1)
        changed = sentence_ids != sentence_ids.gather(1, before.clamp(min=0))
        starts = real & changed  # the first real token has rank 0, where a sentence starts anyway
        offset = rank - torch.where(starts, rank, 0).cummax(-1).values
        word = offset % width
        sentence = (real & (word == 0)).long().cumsum(-1) - 1
        count = int(sentence.max()) + 1 if length else 0
        count = max(count, 1)
    places = count * width
    slot = torch.where(real, sentence * width + word, places)
    source = torch.full((batch, places + 1), length, dtype=torch.long, device=device)
    source = source.scatter(1, slot, order.expand(batch, -1))[:, :places]
    words = (source < length).view(batch, count, width)
    return Nesting(count, width, slot, source, words, whole=False)


def sentence_ids_of(input_ids: Tensor, separators: tuple[int, ...] | list[int]) -> Tensor:
    """Sentence numbers [B, T] of ids [B, T] in which any of `separators` (a full stop, `[SEP]`) ends a sentence."""
    ends = torch.isin(input_ids, constant(separators, input_ids.device)).long()
    return ends.cumsum(-1) - ends


class AttentivePooling(nn.Module):
    """sum_i a_i x_i, a = softmax_i(q tanh(W x_i + b)) over real items (Yang et al. 2016)."""

    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.query = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, items: Tensor, mask: Tensor) -> Tensor:
        """items [..., N, D], mask [..., N] boolean -> [..., D]; zeros where nothing is real."""
        scores = self.query(torch.tanh(self.key(items))).squeeze(-1)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights = torch.softmax(wide.masked_fill(~mask, torch.finfo(wide.dtype).min), dim=-1).masked_fill(~mask, 0.0)
        return (weights.to(items.dtype).unsqueeze(-2) @ items).squeeze(-2)


class Levels(Prepared):
    """The nesting and the state bundle of each type of sublayer: over the words of a sentence, the same with the
    text's vector after them, and over the sentences of the text."""

    nesting: Nesting
    words: Call
    informed: Call
    document: Call

    @classmethod
    def of(cls, context: Call, nesting: Nesting, position: Position, like: Tensor) -> Levels:
        words, filled = nesting.words.flatten(0, 1), nesting.filled
        informed = torch.cat([words, filled.flatten().unsqueeze(-1)], dim=-1)
        masks = (words, informed, filled)

        def level(mask: Tensor) -> Call:
            rows, length = mask.shape
            places = torch.arange(length, device=mask.device)
            derived = context.derive(
                padding_mask=None if nesting.whole else mask,
                positions=places[None],
                query_index=places,
                key_index=places,
                fresh=True,
                inputs_embeds=like.new_zeros(1).expand(rows, length, like.shape[-1]),
                position_ids=None,
                inputs={},
            )
            position.share_rotations(derived, like)
            return derived

        return cls(nesting, *(level(mask) for mask in masks))
