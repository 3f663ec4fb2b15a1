# SPDX-License-Identifier: Apache-2.0
"""A mixture of discretized logistic distributions over intensities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.components import bounded, register
from .base import HeadSpec

# The least is the released code's: narrower than a step between intensities nothing can be told apart. Wider than the
# largest a distribution is flat.
LOG_SCALES = (-7.0, 20.0)


class LogisticMixtureHead(nn.Module):
    """logits_v = log sum_k pi_k (sigma((x_v + d - mu_k) / s_k) - sigma((x_v - d - mu_k) / s_k)), the log probabilities
    of the intensities v = 0 .. V - 1 at x_v = 2 v / (V - 1) - 1 with d = 1 / (V - 1); the lowest and the highest have
    all that lies beyond them (Salimans et al. 2017, arXiv 1701.05517, section 2.1; Parmar et al. 2018, arXiv
    1802.05751, section 3.4).

    pi, mu and log s come from one linear map of a token's state, for one channel of one pixel; what channels have to
    do with one another is up to the model, which reads them one after the other. In float32 at least.
    """

    decoder: None = None  # there is no matrix of tokens, which could be tied or resized

    def __init__(self, config, spec: LogisticMixtureSpec):
        super().__init__()
        self.levels = spec.num_outputs(config)
        self.mixture = nn.Linear(config.stack.output_width(config), 3 * spec.num_mixtures)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> log probabilities [..., V]."""
        found = self.mixture(hidden_states)
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        weights, means, scales = wide.unsqueeze(-2).chunk(3, dim=-1)  # [..., 1, K] each
        inverse = torch.exp(-scales.clamp(*LOG_SCALES))
        steps = max(self.levels - 1, 1)
        place = torch.arange(self.levels, device=wide.device, dtype=wide.dtype)[:, None]
        centre = (2.0 * place / steps - 1.0 - means) * inverse
        half = inverse / steps
        # log(sigma(b) - sigma(a)) = log sigma(b) + log sigma(-a) + log(1 - exp(a - b)), without a difference of
        # numbers that are nearly equal.
        upper, lower = F.logsigmoid(centre + half), F.logsigmoid(half - centre)
        first, last = place == 0, place == self.levels - 1
        inside = torch.log(-torch.expm1(-2.0 * half)).masked_fill(first | last, 0.0)
        each = upper.masked_fill(last, 0.0) + lower.masked_fill(first, 0.0) + inside
        logits = torch.logsumexp(weights.log_softmax(-1) + each, dim=-1)
        return logits.clamp(min=torch.finfo(found.dtype).min).to(found.dtype)


@register("head", "logistic_mixture")
class LogisticMixtureSpec(HeadSpec):
    """num_mixtures: logistic distributions of a token. levels: how many intensities there are, the first ids of the
    vocabulary (`None`: all of it)."""

    summary = "a mixture of logistic distributions over intensities; logits are log probabilities"
    any_width = True
    resizes = False

    num_mixtures: int = bounded(10, least=1)
    levels: int | None = bounded(None, least=1)

    def check(self, config) -> None:
        if self.levels is not None and self.levels > config.vocab_size:
            raise ValueError(
                f"logistic_mixture predicts `levels` {self.levels}, of which `vocab_size` {config.vocab_size} has not"
                " that many; lower it."
            )

    def tied(self, config) -> dict[str, str]:
        return {}

    def num_outputs(self, config) -> int:
        return config.vocab_size if self.levels is None else self.levels

    def build(self, config, **where) -> LogisticMixtureHead:
        return LogisticMixtureHead(config, self)
