# SPDX-License-Identifier: Apache-2.0
"""InDIGO's head: which word comes next, and where it is inserted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention.shared.query_blocks import over_query_blocks, rows_at_once
from ..core.components import register
from ..core.hand_overs import HandOver
from ..ops.common.real_tokens import is_first_real
from .base import HeadSpec
from .language_model import LanguageModelHead


class InsertionHead(LanguageModelHead):
    """One linear map of the last states h gives, for each token, its own left and right slot, a pointer and a content
    state (Gu et al. 2019, arXiv 1902.01370, section 3.2). Words are predicted from the content: logits = W content(h).

    Place of the next word y (word first): softmax over the 2 t slots of the t tokens so far of (pointer_t + E[y]) /
    sqrt(2) . slot / sqrt(D).
    """

    def __init__(self, config):
        super().__init__(config, transform=None, bias=False, scale=False)
        self.parts = nn.Linear(config.hidden_size, 4 * config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self.decoder(self.parts(hidden_states).chunk(4, dim=-1)[0])

    def pointers(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> pointers, left slots and right slots, [B, T, D] each."""
        _, pointer, left, right = self.parts(hidden_states).chunk(4, dim=-1)
        return pointer, left, right


def slot_scores(pointer: Tensor, words: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """pointer [B, t, D], vectors of the next words [B, t, D], left and right slots [B, s, D] -> [B, t, 2 s], left
    slots first."""
    query = (pointer + words) * (0.5 / pointer.shape[-1]) ** 0.5
    return torch.matmul(query, torch.cat((left, right), dim=1).transpose(-1, -2))


def legal_slots(places: Tensor, real: Tensor) -> Tensor:
    """places, real [B, S] -> [B, 2 S] boolean: all slots of real tokens but those outside the text: left of its first
    token, and right of its second where that is the right boundary (no token stands right of it)."""
    number = real.long().cumsum(-1)
    last = places.masked_fill(~real, -1).amax(-1, keepdim=True)
    begin, end = is_first_real(real), real & (number == 2) & (places == last) & (number.amax(-1, keepdim=True) > 2)
    return torch.cat((real & ~begin, real & ~end), dim=-1)


def place_log_likelihood(
    pointer: Tensor, words: Tensor, left: Tensor, right: Tensor, places: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Log probability that the token generated at n + 1 is inserted where `places` [B, T] says, for n = 0 .. T - 2,
    and whether that place has a slot, [B, T - 1] each.

    A gap between neighbors has two names, the right slot of one and the left slot of the other, whose probabilities
    add up (released code). pointer, left, right [B, T, D]; words [B, T - 1, D]: vectors of the tokens at 1 .. T - 1;
    real [B, T].
    """
    length = places.shape[1] - 1
    if not length:  # a text of one token inserts nothing
        return pointer[:, :0, 0], real[:, :0]
    order = torch.arange(length + 1, device=places.device)
    legal = legal_slots(places, real)
    far = places.amax() + 1

    def block(begin: int, end: int, pointer: Tensor, words: Tensor) -> Tensor:
        seen = real[:, None, :end] & (order[:end] <= order[begin:end, None])
        place, others = places[:, begin + 1 : end + 1, None], places[:, None, :end]
        before, after = seen & (others < place), seen & (others > place)
        neighbour_left = others.masked_fill(~before, -1).amax(-1, keepdim=True)
        neighbour_right = others.masked_fill(~after, far).amin(-1, keepdim=True)
        names = torch.cat((after & (others == neighbour_right), before & (others == neighbour_left)), dim=-1)
        allowed = torch.cat((legal[:, :end], legal[:, length + 1 : length + 1 + end]), dim=-1)[:, None]
        allowed = allowed & torch.cat((seen, seen), dim=-1)
        scores = slot_scores(pointer, words, left[:, :end], right[:, :end])
        lowest = torch.finfo(scores.dtype).min
        found = (names & allowed).any(-1)
        chosen = scores.masked_fill(~(names & allowed), lowest).logsumexp(-1)
        total = scores.masked_fill(~allowed, lowest).logsumexp(-1)
        return torch.stack((torch.where(found, chosen - total, 0.0), found.to(scores.dtype)), dim=-1)

    rows = rows_at_once(2 * places.shape[0] * (length + 1))
    result = over_query_blocks(block, length, rows, (pointer[:, :length], 1), (words, 1))
    return result[..., 0], result[..., 1] > 0


@register("head", "insertion")
class InsertionHeadSpec(HeadSpec):
    """The next word, and the slots that it may be inserted at (InDIGO)."""

    splits = frozenset({"vocabulary"})
    summary = "a next word and the place where it is inserted"

    def check(self, config) -> None:
        if config.is_decoder and HandOver.INSERTION_ORDER not in config.position.gives:
            raise ValueError(
                f"head 'insertion' reads tokens in the order of their generation; use it with position 'indigo', not "
                f"{config.position.type!r}."
            )

    def build(self, config, **where) -> InsertionHead:
        return InsertionHead(config)
