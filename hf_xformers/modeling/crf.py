# SPDX-License-Identifier: Apache-2.0
"""A linear chain over tags: a conditional random field, its loss and its best sequences."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.reading_weights import weight_of
from ..ops.common.constants import constant
from ..ops.common.real_tokens import real_first
from ..ops.common.segments import accumulation_dtype

_ENTITY_TAG = re.compile(r"O|[BIESLU]-.+")
# Forbidden steps cost this much: more than any sum of scores, and still a number in float16.
_FORBIDDEN = -1e4


def allowed_steps(names: Sequence[str]) -> tuple[list[bool], list[list[bool]], list[bool]] | None:
    """Which tags [C] may begin a sequence, which [C, C] may follow which, and which [C] may end it, where `names` are
    tags of entities in BIO, BIOES or BILOU; None where they are others, of which nothing is known.

    I and E (L) continue with an entity of their type, which B or I began; in BIOES and BILOU an entity that began has
    to end. `O` stands outside.
    """
    if not all(_ENTITY_TAG.fullmatch(name) for name in names) or not any(name != "O" for name in names):
        return None
    parts = [(name[0], name[2:]) for name in names]
    whole = any(mark in "ESLU" for mark, _ in parts)

    def follows(before: tuple[str, str], after: tuple[str, str]) -> bool:
        inside = before[0] in "BI"
        if after[0] in "IEL":
            return inside and before[1] == after[1]
        return not (inside and whole)

    outside = ("O", "")
    start, end = [follows(outside, tag) for tag in parts], [follows(tag, outside) for tag in parts]
    return start, [[follows(before, after) for after in parts] for before in parts], end


class LinearChainCRF(nn.Module):
    """p(y | x) = exp(s(x, y)) / sum_y' exp(s(x, y')), s(x, y) = a_{y_1} + sum_t e_t[y_t] + sum_t A[y_{t-1}, y_t] +
    b_{y_n} (Lafferty et al. 2001; Lample et al. 2016, arXiv 1603.01360, section 2.2).

    e [B, T, C] are scores of single tags, `mask` [B, T] says which tokens have a tag: the chain runs over those alone,
    wherever they stand. A row without any has loss 0. Sums are in float32 at least. The steps of the recursions are
    one after the other, of O(B C^2) each: what they compute is a chain.

    Where tags are those of entities, best sequences are well-formed; the loss is over all sequences, so that data with
    others can be learnt from, too.

    With weights w_c of tags (`weigh`) sequences count w_{y_1} ... w_{y_n} times: what is trained is
    p'(y | x) ~ p(y | x) / prod_t w_{y_t}, so that p learns the share of every sequence times its weight, as a weighted
    cross-entropy does for single tags (logit adjustment, Menon et al. 2021, arXiv 2007.07314). In evaluation mode
    there are no weights.
    """

    log_weights: Tensor | None

    def __init__(self, names: Sequence[str]):
        super().__init__()
        count = len(names)
        self.start, self.end = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(count))
        self.steps = nn.Parameter(torch.zeros(count, count))
        self.allowed = allowed_steps(names)
        self.register_buffer("log_weights", None, persistent=False)

    def weigh(self, weights: Tensor) -> None:
        """How much tags [C] count in training, each above 0."""
        self.log_weights = weights.to(self.start.device).log()

    def initialize(self, config, init) -> None:
        for parameter in (self.start, self.end, self.steps):
            init.normal_(parameter, mean=0.0, std=config.initializer_range)

    def _scores(self, like: Tensor, constrained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Start [C], steps [C, C] and end [C] in the type of `like`."""
        scores = tuple(weight_of(self, name).to(like.dtype) for name in ("start", "steps", "end"))
        if constrained and self.allowed is not None:
            kept = (constant(one, like.device) for one in self.allowed)
            scores = tuple(torch.where(one, score, score + _FORBIDDEN) for score, one in zip(scores, kept))
        return scores[0], scores[1], scores[2]

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """-log p(tags | emissions), [B]. tags [B, T]: ids, anything where the mask is False."""
        with torch.autocast(emissions.device.type, enabled=False):
            emissions, order = _together(emissions.to(accumulation_dtype(emissions.dtype)), mask)
            count = mask.sum(1)
            tags = tags.masked_fill(~mask, 0).gather(1, order)
            if self.training and self.log_weights is not None:
                emissions = emissions - self.log_weights.to(emissions.dtype)
            start, steps, end = self._scores(emissions)
            real = torch.arange(tags.shape[1], device=tags.device)[None] < count[:, None]
            score = (emissions.gather(2, tags[..., None]).squeeze(2) * real).sum(1) + start[tags[:, 0]]
            score = score + (steps[tags[:, :-1], tags[:, 1:]] * real[:, 1:]).sum(1)
            score = score + end[tags.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)]
            forward = start + emissions[:, 0]
            for place in range(1, emissions.shape[1]):
                further = torch.logsumexp(forward[:, :, None] + steps, dim=1) + emissions[:, place]
                forward = torch.where(real[:, place, None], further, forward)
            partition = torch.logsumexp(forward + end, dim=1)
            return torch.where(count > 0, partition - score, torch.zeros_like(partition))

    @torch.no_grad()
    def best(self, emissions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The best sequence of every row [B, T], 0 where there is no tag; and of every tag of every token how much
        worse the best sequence with it is, [B, T, C], at most 0, and 0 for the best sequence's own (Viterbi 1967, and
        its max-marginals)."""
        with torch.autocast(emissions.device.type, enabled=False):
            emissions, order = _together(emissions.to(accumulation_dtype(emissions.dtype)), mask)
            length, count = emissions.shape[1], mask.sum(1)
            start, steps, end = self._scores(emissions, constrained=True)
            real = torch.arange(length, device=mask.device)[None] < count[:, None]
            last = torch.arange(length, device=mask.device)[None] == count[:, None] - 1
            ahead, pointers = [start + emissions[:, 0]], []
            for place in range(1, length):
                value, pointer = (ahead[-1][:, :, None] + steps).max(dim=1)
                ahead.append(value + emissions[:, place])
                pointers.append(pointer)
            behind, found = [torch.zeros_like(ahead[0])] * length, [torch.zeros_like(count)] * length
            after = chosen = None
            for place in reversed(range(length)):
                ends = last[:, place]
                beyond = end.expand_as(ahead[0])
                tag = (ahead[place] + end).argmax(1)
                if after is not None and chosen is not None:
                    onward = (steps + (emissions[:, place + 1] + after)[:, None]).max(dim=2).values
                    beyond = torch.where(ends[:, None], beyond, onward)
                    tag = torch.where(ends, tag, pointers[place].gather(1, chosen[:, None]).squeeze(1))
                behind[place], found[place] = beyond, tag
                after, chosen = beyond, tag
            sums = torch.stack(ahead, 1) + torch.stack(behind, 1)
            path = torch.stack(found, 1).masked_fill(~real, 0)
            lost = (sums - sums.amax(-1, keepdim=True)).clamp(max=-1e-4)  # of equally good sequences the one found
            lost = lost.scatter(2, path[..., None], 0.0)
            back = order.argsort(1)
            return path.gather(1, back), lost.gather(1, back[..., None].expand_as(lost))


def _together(emissions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """emissions [B, T, C] with the tokens that have a tag at the front of their rows, in order; and from where they
    come, [B, T]."""
    order = real_first(mask)
    return emissions.gather(1, order[..., None].expand_as(emissions)), order
