# SPDX-License-Identifier: Apache-2.0
"""Contrastive losses: one right answer against some wrong ones. All sums are in float32 at least.

s+ [...] is the score of the right answer, s- [..., k] are those of wrong ones, drawn from a noise law q. Scores of
`absent` are no answers. Each loss is one number for every right answer, [...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .distributed import rows_of_processes


def absent(dtype: torch.dtype) -> float:
    """The score that stands where there is no answer."""
    return torch.finfo(dtype).min


def ranking_loss(positive: Tensor, negative: Tensor, margin: float = 1.0) -> Tensor:
    """sum_i max(0, margin - s+ + s-_i) (Collobert and Weston 2008, section 4)."""
    positive, negative = _wide(positive), _wide(negative)
    return (margin - positive.unsqueeze(-1) + negative).clamp(min=0).sum(-1)


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log(e^{s+} / (e^{s+} + sum_i e^{s-_i})): InfoNCE (van den Oord, Li and Vinyals 2018, arXiv 1807.03748, equation
    4), and with one wrong answer softplus(s- - s+), the loss of contrastive learning in Qiu et al. 2020 (arXiv
    2003.08271, section 3.1.5)."""
    positive, negative = _wide(positive), _wide(negative)
    return torch.cat([positive.unsqueeze(-1), negative], dim=-1).logsumexp(-1) - positive


def nce_loss(positive: Tensor, negative: Tensor, log_q_positive: Tensor, log_q_negative: Tensor) -> Tensor:
    """-log sig(s+ - log(k q(y+))) - sum_i log(1 - sig(s-_i - log(k q(y_i)))) (Gutmann and Hyvarinen 2010; Mnih and Teh
    2012), k the number of wrong answers that are there. log_q_*: log q of the answers, shaped like their scores.

    Raises ValueError for a wrong answer that q cannot have given.
    """
    positive, negative = _wide(positive), _wide(negative)
    there = negative > absent(negative.dtype)
    if bool((torch.isneginf(log_q_negative) & there).any()):
        raise ValueError(
            "Noise-contrastive estimation needs q > 0 of every answer that was drawn, got log q = -inf; give the law"
            " that the answers were drawn from."
        )
    shift = there.sum(-1).clamp(min=1).to(positive.dtype).log()
    right = positive - shift - log_q_positive.to(positive.dtype)
    wrong = negative - shift.unsqueeze(-1) - log_q_negative.to(negative.dtype)
    return F.softplus(-right) + F.softplus(wrong).masked_fill(~there, 0.0).sum(-1)


def negative_sampling_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log sig(s+) - sum_i log sig(-s-_i) (Mikolov et al. 2013, arXiv 1310.4546, equation 4)."""
    return F.softplus(-_wide(positive)) + F.softplus(_wide(negative)).sum(-1)


def unigram_noise(counts: Tensor, power: float = 0.75) -> Tensor:
    """q [..., V] ~ counts^power, float64 (Mikolov et al. 2013, section 2.2); what was never counted is never drawn."""
    weights = counts.double().pow(power).masked_fill(counts == 0, 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def draw_answers(law: Tensor, uniform: Tensor) -> Tensor:
    """The answers [..., k] of `law` [..., V] that numbers `uniform` [..., k] in [0, 1) stand for: the first one up to
    which the law adds to more than the number. (A draw without a generator, so that rows bring their own.)"""
    upto = law.double().cumsum(-1)
    wanted = uniform.double() * upto[..., -1:]
    found = torch.searchsorted(upto, wanted.contiguous(), right=True)
    last = (law > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # rounding must not reach behind it
    return torch.minimum(found, last)


@dataclass
class Matches:
    """Scores [N, M] of N answers' questions and M candidates, where the right ones stand (own [N]), which candidates
    there are (real [M]), and keys [M] that are equal for equal ones."""

    scores: Tensor
    own: Tensor
    real: Tensor
    keys: Tensor

    def wrong(self) -> Tensor:
        """Which candidates [N, M] are wrong answers: all that there are but the right one and its equals."""
        wrong = self.real & (self.keys != self.keys[self.own][:, None])
        return wrong.scatter(1, self.own[:, None], False)

    def law(self, power: float) -> Tensor:
        """q [M] of the candidates: of each one as often as it stands there, to `power` ([`unigram_noise`]); its copies
        share it evenly."""
        counts = ((self.keys[:, None] == self.keys) & self.real).sum(-1) * self.real
        weights = torch.where(counts > 0, counts.double().clamp(min=1).pow(power - 1), 0.0)
        return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def match(
    anchors: Tensor,
    candidates: Tensor,
    there: Tensor,
    *,
    scale: float = 1.0,
    keys: Tensor | None = None,
    gather: bool = True,
) -> Matches:
    """s_ij = scale a_i b_j in float32 at least, with the candidates of all processes (`gather`), or of this one.

    anchors, candidates [N, D], there [N] boolean, of which the others are no candidates (their score is `absent`).
    keys [N]: whole numbers, equal for equal candidates; None: no two are.
    """
    wide = torch.promote_types(anchors.dtype, torch.float32)
    others, real, first = candidates.to(wide), there, 0
    # A number of its own for each of all processes' rows is below 0, where no key is.
    every = None if keys is None else keys.to(there.device)
    if gather:
        others, real, first = rows_of_processes(others, there)
        if every is not None:  # float64 holds whole numbers up to 2^53
            every = rows_of_processes(every.double()[:, None], there)[0][:, 0].long()
    if every is None:
        every = -1 - torch.arange(others.shape[0], device=others.device)
    with torch.autocast(anchors.device.type, enabled=False):  # the product is wide, too
        scores = anchors.to(wide) @ others.mT * scale
    own = torch.arange(first, first + anchors.shape[0], device=anchors.device)
    return Matches(scores.masked_fill(~real, absent(wide)), own, real, every)


def info_nce(scores: Tensor, own: Tensor, there: Tensor) -> Tensor:
    """[`softmax_loss`] of each row of scores [N, M], whose right answer is own [N]; 0 where there [N] is False."""
    return F.cross_entropy(scores, own, reduction="none").masked_fill(~there, 0.0)


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()
