# SPDX-License-Identifier: Apache-2.0
"""Early exit by votes: classifiers inside the stack that outvote one another."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from .early_exit import EarlyExitSpec
from .exits import Classifier
from .patience_exit import PatienceExits


class VotingExits(PatienceExits):
    """The classifiers after layers 1 .. l as an ensemble (Sun et al. 2021, arXiv 2105.13792, section 3): with y_i the
    label of classifier i and v_c = #{i <= l : y_i = c}, a text leaves after the first l with max_c v_c / l^lambda >=
    tau, and its label is argmax_c v_c. After the last layer all L classifiers vote. Of labels with equal votes the one
    with the larger mean logit wins. The logits given out are the mean of those of the classifiers that voted for the
    winner, whose largest is the winner's.

    All are trained at once: sum_l l (CE_l - beta min_{i < l} min(CE(p_i, p_l), log C)) / sum_l l, where the second
    term (p_i constant) keeps a classifier apart from the one before it that it is nearest to. It is counted up to log
    C, which is far enough, as it has no bound of its own.
    """

    pools_answers: ClassVar[bool] = True
    spec: VotingExitSpec  # type: ignore[assignment]

    def rule(self, model: Classifier):
        if self.kind(model.config) != "single_label_classification":
            return None  # numbers and sets of labels do not vote
        return _Votes(self.spec, self.spec.resolved(model.config))

    def further_loss(self, answers: list[Tensor], kind: str | None) -> Tensor | None:
        if not self.spec.diversity_weight or kind in ("regression", "multi_label_classification"):
            return None
        if answers[0].shape[-1] < 2:
            return None
        wide = [one if one.dtype == torch.float64 else one.float() for one in answers]
        logs = torch.stack([one.log_softmax(-1) for one in wide])  # [L, B, C]
        crosses = -torch.einsum("ibc,lbc->lib", logs.detach().exp(), logs)
        count = len(answers)
        later = torch.ones(count, count, dtype=torch.bool, device=logs.device).tril(-1)
        apart = crosses.masked_fill(~later[..., None], torch.inf)[1:].amin(1).clamp(max=math.log(logs.shape[-1]))
        weights = torch.arange(1, count + 1, device=logs.device, dtype=logs.dtype)
        return -self.spec.diversity_weight * (apart.mean(-1) * weights[1:]).sum() / weights.sum()


class _Votes:
    """Each row's votes [B, C], and the sums of the logits of those who voted for each label [B, C, C]."""

    def __init__(self, spec: VotingExitSpec, threshold: float):
        self.spec, self.threshold = spec, threshold
        self.votes: Tensor | None = None
        self.sums: Tensor | None = None

    def _of(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.votes is None or self.sums is None:
            raise RuntimeError("Nobody has voted yet.")
        return (self.votes, self.sums) if rows is None else (self.votes[rows], self.sums[rows])

    def __call__(self, layer: int, logits: Tensor, rows: Tensor | None) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if self.votes is None or self.sums is None:
            self.votes = torch.zeros_like(wide)
            self.sums = wide.new_zeros(*wide.shape, wide.shape[-1])
        chosen = torch.nn.functional.one_hot(wide.argmax(-1), wide.shape[-1]).to(wide.dtype)
        votes, sums = self._of(rows)
        votes, sums = votes + chosen, sums + chosen[..., None] * wide[:, None]
        self.votes = votes if rows is None else self.votes.index_copy(0, rows, votes)
        self.sums = sums if rows is None else self.sums.index_copy(0, rows, sums)
        if layer < self.spec.min_layers:
            return torch.zeros_like(votes[:, 0], dtype=torch.bool)
        # A threshold such as sqrt(L / 2) is met by whole numbers of votes, whatever rounding makes of the two.
        return votes.amax(-1) >= self.threshold * layer**self.spec.vote_lambda * (1 - 1e-6)

    def answers_of(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        votes, sums = self._of(rows)
        means = sums / votes.clamp(min=1)[..., None]
        own = means.diagonal(dim1=1, dim2=2).masked_fill(votes < votes.amax(-1, keepdim=True), -torch.inf)
        winner = own.argmax(-1)
        return means.take_along_dim(winner[:, None, None], dim=1).squeeze(1).to(logits.dtype)


@register("stack", "voting_exit", aliases=("voting_early_exit",))
class VotingExitSpec(EarlyExitSpec):
    """A text leaves when enough of the classifiers that it has passed agree.

    Args:
        vote_threshold: tau; `None`: (L/2)^(1 - lambda), which half of L layers reach that all agree; infinite: all
            classifiers vote.
        vote_lambda: from 0, where the number of votes counts, to 1, where their share does.
        min_layers: no text leaves before this many layers have voted.
        diversity_weight: beta, how much classifiers are to differ; 0: each is trained to be right, and no more. All
            but the last act in evaluation mode.
    """

    summary = "a text leaves when enough of the classifiers so far agree"

    vote_threshold: float | int | None = bounded(None, above=0)
    vote_lambda: float | int = bounded(0.5, least=0, most=1)
    min_layers: int = bounded(2, least=1)
    diversity_weight: float | int = bounded(0.1, least=0)

    def resolved(self, config) -> float:
        """tau for this config."""
        if self.vote_threshold is not None:
            return float(self.vote_threshold)
        return max(config.num_hidden_layers / 2, 1.0) ** (1 - self.vote_lambda)

    def settings(self, config) -> dict[str, tuple]:
        if self.vote_lambda == 1:
            return {"vote_threshold": (math.inf, 1.0, 0.9, 0.8, 0.7, 0.6)}
        depths = range(config.num_hidden_layers - 1, 0, -1)
        return {"vote_threshold": (math.inf, *(round(depth ** (1 - self.vote_lambda), 4) for depth in depths))}

    def check_fields(self) -> None:
        if self.vote_lambda == 1 and 1 < (self.vote_threshold or 0) < math.inf:
            raise ValueError(
                f"voting_exit with `vote_lambda` 1 compares the share of votes, which is never {self.vote_threshold};"
                " choose a `vote_threshold` of at most 1, or infinity to use all layers on purpose."
            )

    def build_exits(self, config) -> nn.Module:
        return VotingExits(config, self)  # type: ignore[arg-type]
