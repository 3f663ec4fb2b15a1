# SPDX-License-Identifier: Apache-2.0
"""Generation by insertion: decoding, and the search for the order in which a text is generated (InDIGO)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..core.cache import make_cache
from ..embedding.token import stored_vectors
from ..heads.insertion import slot_scores
from ..ops.common.real_tokens import real_places


class Slots:
    """The cache of a text that grows by insertion, and the slots of its tokens.

    Columns are the tokens in the order of their generation, after padding on the left.
    """

    def __init__(self, model: Any, mask: Tensor):
        self.model, self.cache, self.mask = model, make_cache(model.config), mask
        self.left = self.right = torch.empty(0)

    def read(self, fresh: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens [R, t], with the places [R, all] of all -> last states and pointers [R, D]."""
        states = self.model.model(
            input_ids=fresh,
            insertion_positions=places,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        pointer, left, right = self.model.lm_head.pointers(states)
        first = not self.left.numel()
        self.left = left if first else torch.cat((self.left, left), 1)
        self.right = right if first else torch.cat((self.right, right), 1)
        return states[:, -1], pointer[:, -1]

    def scores(self, pointer: Tensor, words: Tensor, places: Tensor) -> Tensor:
        """pointer [R, D], words [R, w] -> logits [R, w, 2 t] of the slots, left ones first; -inf outside the text."""
        vectors = stored_vectors(self.model.get_input_embeddings(), words).to(pointer.dtype)
        scores = slot_scores(pointer[:, None].expand_as(vectors), vectors, self.left, self.right)
        last = places.amax(-1, keepdim=True)
        outside = torch.cat((~self.mask | (places == 0), ~self.mask | (places == last)), dim=-1)
        return scores.masked_fill(outside[:, None], -torch.inf)

    def append(self) -> None:
        """One more token in every row."""
        self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)

    def reorder(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
        self.left, self.right, self.mask = self.left[rows], self.right[rows], self.mask[rows]


@torch.no_grad()
def insert_words(
    model: Any, input_ids: Tensor, mask: Tensor, max_new_tokens: int, ends: Collection[int]
) -> list[list[int]]:
    """Greedy decoding: the likeliest word, then the likeliest slot for it, until one of `ends` is the likeliest.

    input_ids, mask [B, T], padding on the left: both boundaries, then words of the text from left to right. Returns
    the tokens of each row in the order of the text.
    """
    count = mask.sum(-1, keepdim=True)
    number = real_places(mask)  # 0, 1: the boundaries
    places = torch.where(number == 0, 0, torch.where(number == 1, count - 1, number - 1)).masked_fill(~mask, -1)
    slots, tokens, fresh, kept = Slots(model, mask), input_ids, input_ids, mask
    done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    for _ in range(max_new_tokens):
        state, pointer = slots.read(fresh, places)
        word = model.lm_head(state).argmax(-1)
        for end in ends:
            done = done | (word == end)
        if bool(done.all()):
            break
        slot = slots.scores(pointer, word[:, None], places)[:, 0].argmax(-1)
        neighbour = places.gather(1, (slot % tokens.shape[1])[:, None])
        place = neighbour + (slot >= tokens.shape[1])[:, None]  # a left slot: its token and all after it move on
        places = torch.cat((places + (places >= place), place), dim=1)
        tokens, fresh = torch.cat((tokens, word[:, None]), dim=1), word[:, None]
        kept = torch.cat((kept, ~done[:, None]), dim=1)
        slots.append()
    return [row[keep][place[keep].argsort()].tolist() for row, keep, place in zip(tokens, kept, places)]


@torch.no_grad()
def search_orders(model: Any, words: Tensor, lengths: Tensor, bounds: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """The likeliest orders in which to generate given texts (section 3.3): a beam search over which word comes next.

    words [B, n] in the order of the text, padded on the right; lengths [B]; bounds [B, 2]: the boundary tokens ->
    orders [B, beam, n], the likeliest first, and their log likelihoods [B, beam], words and places; -inf where a text
    has fewer orders. Padding comes last in all of them.
    """
    batch, longest = words.shape
    device, vocabulary = words.device, torch.arange(longest, device=words.device)
    first_row = torch.arange(batch, device=device)[:, None] * beam
    real = (vocabulary < lengths[:, None]).repeat_interleave(beam, 0)
    words, lengths = words.repeat_interleave(beam, 0), lengths.repeat_interleave(beam, 0)
    places = torch.stack((torch.zeros_like(lengths), lengths + 1), dim=-1)
    fresh = bounds.repeat_interleave(beam, 0)
    slots = Slots(model, torch.ones_like(fresh, dtype=torch.bool))
    used, orders = torch.zeros_like(real), words[:, :0]
    total = torch.full((batch, beam), -torch.inf, dtype=torch.float64, device=device)
    total[:, 0] = 0.0
    for step in range(longest):
        state, pointer = slots.read(fresh, places)
        likelihood = model.lm_head(state).double().log_softmax(-1).gather(1, words)
        scores = slots.scores(pointer, words, places).double()
        target, others = vocabulary[None, :, None] + 1, places[:, None]
        before, after = others < target, (others > target) & (others <= lengths[:, None, None] + 1)
        left = before & (others == others.masked_fill(~before, -1).amax(-1, keepdim=True))
        right = after & (others == others.masked_fill(~after, longest + 2).amin(-1, keepdim=True))
        # The gap's two names: the left slot of the word to the right, and the right slot of the one to the left.
        named = scores.masked_fill(~torch.cat((right, left), dim=-1), -torch.inf)
        likelihood = likelihood + named.logsumexp(-1) - scores.logsumexp(-1)
        possible = torch.where(step < lengths[:, None], real & ~used, vocabulary == step)
        likelihood = torch.where(real, likelihood, 0.0).masked_fill(~possible, -torch.inf)
        total, best = (total[..., None] + likelihood.view(batch, beam, -1)).flatten(1).topk(beam)
        rows, chosen = (first_row + best // longest).flatten(), (best % longest).view(-1, 1)
        slots.reorder(rows)
        slots.append()
        used = used[rows].scatter(1, chosen, True)
        orders = torch.cat((orders[rows], chosen), dim=1)
        places = torch.cat((places[rows], chosen + 1), dim=1)
        fresh = words.gather(1, chosen)
    return orders.view(batch, beam, longest), total
