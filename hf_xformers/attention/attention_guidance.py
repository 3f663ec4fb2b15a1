# SPDX-License-Identifier: Apache-2.0
"""Attention guidance: an auxiliary loss that draws some heads towards simple patterns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, check_layers
from ..core.distributed import sum_over_processes
from ..core.prepared import Prepared
from ..ops.common.real_tokens import is_first_real
from .shared.head_parts import HeadLoss, HeadLossModule, Heads, register_loss

PATTERNS = ("same", "next", "previous", "first")


class Strength(Prepared):
    """alpha_t / alpha_0 of a call, in a slot for each layer."""

    alpha: Tensor


class GuidanceLoss(HeadLossModule):
    """alpha_t sum over patterns p of the mean of (A - P_p)^2 over the heads of p and all pairs of real tokens, in each
    layer (Deshpande & Narasimhan 2020, arXiv 2010.02399, section 3; released code).

    P_p has a one in each row, at the query itself (`same`), the token after or before it, or the first of its text,
    and no one where there is no such token. As the rows of P have one entry at most, the squares are
    sum_j A_ij^2 - 2 A_i,p(i) + 1: the weights of a block of queries are all that exists at once. They are those before
    dropout. alpha_t is `weight` for `constant_passes` training passes and falls along a line to zero at
    `total_passes`, counted in the buffer `passes`.
    """

    passes: Tensor

    def __init__(self, spec: GuidanceSpec, counts: dict[str, int], layer_idx: int):
        super().__init__()
        self.spec, self.counts, self.layer_idx = spec, counts, layer_idx
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def initialize(self, config, init) -> None:
        init.zeros_(self.passes)

    def prepare(self, context: Call, learns: bool) -> None:
        if context.find(Strength, self.layer_idx) is None:
            context.keep(Strength(self.strength()), self.layer_idx)
            if learns:
                self.passes += 1

    def strength(self) -> Tensor:
        """alpha_t / alpha_0 of the pass that comes next."""
        constant, total = self.spec.constant_passes, self.spec.total_passes
        if total is None:
            return torch.ones_like(self.passes, dtype=torch.float32)
        return ((total - self.passes) / max(total - constant, 1)).clamp(0.0, 1.0)

    def forward(self, heads: Heads) -> dict[str, Tensor]:
        real, first, losses = heads.real_queries, 0, []
        pairs = (real.sum(-1) * heads.real_keys.sum(-1)).sum()
        for pattern, count in self.counts.items():
            if count:
                target, exists = targets(pattern, heads)
                error = heads.sums_of_weights(_errors(target, exists), slice(first, first + count))
                total = torch.where(real, error, 0.0).sum()
                losses.append(torch.stack((total / count, pairs.to(total.dtype))))
                first += count
        if not losses:
            return {}
        sums, numbers = sum_over_processes(torch.stack(losses)).unbind(-1)
        found = heads.context.find(Strength, self.layer_idx)
        strength = self.strength() if found is None else found.alpha
        return {"attention_guidance": self.spec.weight * strength.to(sums.dtype) * (sums / numbers.clamp(min=1)).sum()}


def targets(pattern: str, heads: Heads) -> tuple[Tensor, Tensor]:
    """Which key each query of `heads` is drawn to: slots [B, T], and whether there is such a token, [B, T]."""
    context, real = heads.context, heads.real_keys
    batch, total = real.shape
    slots = context.query_index.expand(batch, -1)
    # The number of each slot's text; padding belongs to none.
    text = torch.zeros_like(real, dtype=torch.long) if context.segment_ids is None else context.segment_ids
    text = text.masked_fill(~real, -1)
    if pattern == "first":
        begins = F.pad(text[:, 1:] != text[:, :-1], (1, 0), value=True)
        if context.segment_ids is None:  # padding in between divides no text
            begins = is_first_real(real)
        places = torch.arange(total, device=real.device).expand(batch, -1)
        found = torch.where(begins, places, 0).cummax(-1).values.gather(1, slots)
    else:
        found = slots + {"same": 0, "next": 1, "previous": -1}[pattern]
    inside = (found >= 0) & (found < total)
    found = found.clamp(0, total - 1)
    own = text.gather(1, slots)
    return found, inside & (own >= 0) & (text.gather(1, found) == own)


def _errors(target: Tensor, exists: Tensor):
    """(weights [B, h, t, s], rows) -> squared errors [B, t], summed over heads and keys."""

    def reduce(weights: Tensor, rows: slice) -> Tensor:
        place, one = target[:, None, rows, None], exists[:, None, rows].to(weights.dtype)
        hit = weights.gather(-1, place.clamp(max=weights.shape[-1] - 1).expand(-1, weights.shape[1], -1, -1))[..., 0]
        return (weights.square().sum(-1) - 2 * one * hit + one).sum(1)

    return reduce


@register_loss("attention_guidance")
class GuidanceSpec(HeadLoss):
    """
    Args:
        same, next, previous, first: how many heads, from the first head on and in this order, are drawn to the token
            itself, the one after it, the one before it, and the first one (`None`: of 12 heads one, one and four, in
            proportion; in a decoder none to the next token).
        weight: alpha; a mean over T^2 pairs, of which T are a pattern's, pulls at each token with alpha / T.
        constant_passes: training passes with that weight.
        total_passes: pass at which it has fallen to zero (`None`: it stays).
        layers: those that are guided (`None`: all).
    """

    same: int = bounded(0, least=0)
    next: int | None = bounded(None, least=0)
    previous: int | None = bounded(None, least=0)
    first: int | None = bounded(None, least=0)
    weight: float | int = bounded(100.0, least=0)
    constant_passes: int = bounded(20000, least=0)
    total_passes: int | None = None
    layers: tuple[int, ...] | None = None

    def reads_weights(self) -> bool:
        return True

    def counts(self, config) -> dict[str, int]:
        """Heads by pattern."""
        heads = config.num_attention_heads
        few = max(heads // 12, 1)
        usual = {"same": 0, "next": 0 if config.is_decoder else few, "previous": few, "first": heads // 3}
        given = {pattern: getattr(self, pattern) for pattern in PATTERNS}
        left = heads - sum(count for count in given.values() if count is not None)
        for pattern in PATTERNS:
            if given[pattern] is None:
                given[pattern] = max(min(usual[pattern], left), 0)
                left -= given[pattern]
        return given

    def check_fields(self) -> None:
        if self.total_passes is not None and self.total_passes < self.constant_passes:
            raise ValueError(
                f"attention_guidance needs `total_passes` >= `constant_passes` {self.constant_passes}, got"
                f" {self.total_passes}."
            )

    def check(self, attention, slot: str, config) -> None:
        super().check(attention, slot, config)
        if slot == "cross_attention":
            raise ValueError(
                "attention_guidance draws tokens to tokens of their own text, which `cross_attention` does not read;"
                " give it to `attention`."
            )
        counts = self.counts(config)
        if sum(counts.values()) > config.num_attention_heads:
            raise ValueError(
                f"attention_guidance has patterns for {sum(counts.values())} heads of {config.num_attention_heads};"
                " guide fewer."
            )
        if config.is_decoder and counts["next"]:
            raise ValueError(
                f"attention_guidance draws {counts['next']} heads to the next token (`next`), which a decoder does not"
                " see; set it to 0."
            )
        check_layers(self, config)

    def build(self, config, *, layer_idx: int) -> GuidanceLoss:
        guided = self.layers is None or layer_idx in self.layers
        counts = self.counts(config) if guided else dict.fromkeys(PATTERNS, 0)
        return GuidanceLoss(self, counts, layer_idx)
