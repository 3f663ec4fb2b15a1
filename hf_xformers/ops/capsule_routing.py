# SPDX-License-Identifier: Apache-2.0
"""Routing by agreement: input capsules vote for output capsules, and votes that agree count more.

Votes are [N, I, O, w]: what input capsule i of I says about output capsule o of O, for N tokens by themselves. All in
float32 at least.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST_VARIANCE = 1e-6  # equal votes have none
_LEAST_LENGTH = 1e-12  # squared, of a vector that has a direction


def squash(vectors: Tensor) -> Tensor:
    """|s|^2 / (1 + |s|^2) s / |s| along the last axis (Sabour, Frosst, Hinton 2017, arXiv 1710.09829, eq. 1)."""
    square = vectors.square().sum(-1, keepdim=True)
    return vectors * ((square + _LEAST_LENGTH).sqrt() / (1 + square))


def agreement_routing(votes: Tensor, iterations: int, squashed: bool) -> Tensor:
    """Routing by dot products, [N, I, O, w] -> [N, O, w].

    b = 0; `iterations` times c_i = softmax_o(b_i), out_o from c, b_io += out_o V_io. squashed (Sabour et al. 2017,
    procedure 1): out_o = squash(sum_i c_io V_io); else (Li et al. 2019, arXiv 1904.03100, algorithm 1) the mean of the
    votes with weights c_io.
    """
    logits = votes.new_zeros(votes.shape[:3])
    for step in range(iterations):
        coupling = torch.log_softmax(logits, dim=2)
        # The share of an input among all: its coupling over their sum, which may be too small for a number.
        coupling = coupling.exp() if squashed else torch.softmax(coupling, dim=1)
        output = torch.einsum("nio,niow->now", coupling, votes)
        output = squash(output) if squashed else output
        if step < iterations - 1:
            logits = logits + torch.einsum("now,niow->nio", output, votes)
    return output


def em_routing(votes: Tensor, iterations: int, beta_u: Tensor, beta_a: Tensor, sharpness: float) -> Tensor:
    """Routing by expectation maximization (Hinton, Sabour, Frosst 2018, procedure 1) with inputs that are all active,
    [N, I, O, w] -> act_o mu_o [N, O, w]. beta_u, beta_a [O]; sharpness: lambda, an inverse temperature.

    M: mu_o, var_o of the votes with weights r_io; act_o = sigmoid(lambda (beta_a - sum_w (beta_u + log sd_ow)
    sum_i r_io)). E: r_io = softmax_o(log act_o + log N(V_io; mu_o, var_o)).
    """
    shares = votes.new_full(votes.shape[:3], 1.0 / votes.shape[2])
    for step in range(iterations):
        amount = shares.sum(1)  # [N, O]
        weights = (shares / amount.clamp(min=_LEAST_VARIANCE)[:, None])[..., None]
        mean = (weights * votes).sum(1)
        away = (votes - mean[:, None]).square()
        variance = (weights * away).sum(1) + _LEAST_VARIANCE
        cost = (beta_u[:, None] + 0.5 * variance.log()).sum(-1) * amount
        logits = sharpness * (beta_a - cost)
        if step < iterations - 1:
            density = -0.5 * (away / variance[:, None] + (2 * math.pi * variance).log()[:, None]).sum(-1)
            shares = torch.softmax(torch.nn.functional.logsigmoid(logits)[:, None] + density, dim=2)
    return torch.sigmoid(logits)[..., None] * mean
