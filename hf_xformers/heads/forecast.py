# SPDX-License-Identifier: Apache-2.0
"""Forecasts: the numbers of future time steps, or the parameters of their distribution."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.components import aliased, register
from ..core.hand_overs import HandOver
from ..ops.common.segments import accumulation_dtype
from .base import HeadSpec


class Scaling(NamedTuple):
    """What values become (values - location) / spread with; both [B or 1, 1, channels], float32 at least."""

    location: Tensor
    spread: Tensor


class ForecastHead(nn.Module):
    """Hidden states [B, P, D] -> parameters of each value of P steps: the value itself, or for `student_t` location,
    scale and degrees of freedom (scale = softplus, freedom = 2 + softplus)."""

    def __init__(self, config, spec: ForecastSpec):
        super().__init__()
        self.spec, self.channels = spec, config.embedding.channels
        self.numbers = 3 if spec.loss == "student_t" else 1
        self.projection = nn.Linear(config.hidden_size, self.channels * self.numbers)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Each [B, P, channels], of scaled values, float32 at least; the first is the forecast."""
        found = self.projection(hidden_states)
        parts = found.to(accumulation_dtype(found.dtype)).unflatten(-1, (self.channels, self.numbers)).unbind(-1)
        if self.numbers == 1:
            return parts
        location, scale, freedom = parts
        return location, F.softplus(scale) + 1e-6, 2 + F.softplus(freedom)

    def loss(self, parameters: tuple[Tensor, ...], target: Tensor, observed: Tensor | None) -> Tensor:
        """Mean over the observed values of [B, P, channels]: the squared error, the absolute one, or minus the log
        density (nats); values are scaled."""
        if self.spec.loss == "student_t":
            location, scale, freedom = parameters
            each = -torch.distributions.StudentT(freedom, location, scale, validate_args=False).log_prob(target)
        else:
            error = parameters[0] - target
            each = error.square() if self.spec.loss == "mse" else error.abs()
        if observed is None:
            return each.mean()
        return each.masked_fill(~observed, 0.0).sum() / observed.sum().clamp(min=1)


@register("head", "forecast")
class ForecastSpec(HeadSpec):
    """
    Args:
        context_length: time steps that the encoder reads.
        prediction_length: steps that are forecast, at once.
        label_length: of the context's last steps, how many the decoder reads before the empty ones (`None`: half of
            the context).
        loss: `mse`, `mae`, or `student_t` (minus the log density), on scaled values.
        scaling: by mean and standard deviation of each `window`'s context, by `fixed` ones for all, or `none`.
        location, spread: the fixed mean and deviation of each channel.
    """

    summary = "forecasts of a time series, all steps at once"
    resizes = False
    reads = frozenset({HandOver.SERIES})

    context_length: int = 96
    prediction_length: int = aliased(24, "horizon")
    label_length: int | None = None
    loss: Literal["mse", "mae", "student_t"] = "mse"
    scaling: Literal["window", "fixed", "none"] = "window"
    location: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()

    def check_fields(self) -> None:
        if self.context_length < 1 or self.prediction_length < 1:
            raise ValueError(
                f"forecast needs `context_length` and `prediction_length` >= 1, got {self.context_length} and"
                f" {self.prediction_length}."
            )
        if self.label_length is not None and not 0 <= self.label_length <= self.context_length:
            raise ValueError(
                f"forecast's `label_length` is a part of the context of {self.context_length} steps, got"
                f" {self.label_length}; take a number between 0 and that."
            )
        if (self.scaling == "fixed") != bool(self.location) or len(self.location) != len(self.spread):
            raise ValueError(
                "forecast's `location` and `spread` are for `scaling='fixed'`, a number of both for each channel, got"
                f" {len(self.location)} and {len(self.spread)} numbers with scaling {self.scaling!r}."
            )
        if self.spread and min(self.spread) <= 0:
            raise ValueError(f"forecast divides by `spread`, which has to be positive, got {min(self.spread)}.")

    def check(self, config) -> None:
        if HandOver.SERIES not in config.embedding.gives:
            raise ValueError(
                f"head 'forecast' predicts numbers of a series, which embedding {config.embedding.type!r} does not"
                " read; set `embedding='series'`."
            )
        if self.location and len(self.location) != config.embedding.channels:
            raise ValueError(
                f"forecast has `location` and `spread` for {len(self.location)} channels, and embedding 'series' has"
                f" {config.embedding.channels}; give as many."
            )

    @property
    def known_length(self) -> int:
        """Steps of the decoder's input whose values are known."""
        return self.context_length // 2 if self.label_length is None else self.label_length

    def tied(self, config) -> dict[str, str]:
        return {}

    def scale_of(self, values: Tensor, observed: Tensor | None) -> Scaling:
        """The scaling of the values [B, T, channels] of a context, `observed` (boolean) as far as they are known."""
        wide = values.to(accumulation_dtype(values.dtype))
        if self.scaling == "none":
            return Scaling(wide.new_zeros(1, 1, 1), wide.new_ones(1, 1, 1))
        if self.scaling == "fixed":
            return Scaling(wide.new_tensor(self.location)[None, None], wide.new_tensor(self.spread)[None, None])
        known = torch.ones_like(wide) if observed is None else observed.to(wide)
        count = known.sum(1, keepdim=True).clamp(min=1)
        mean = (wide * known).sum(1, keepdim=True) / count
        variance = ((wide - mean).square() * known).sum(1, keepdim=True) / count
        # A constant context is left as it is; what float32 loses of large numbers is no variation either.
        floor = 1e-6 * mean.abs() + 1e-12
        spread = variance.sqrt()
        return Scaling(mean, torch.where(spread > floor, spread, 1.0))

    def build(self, config, **where) -> nn.Module:
        raise ValueError(
            "head 'forecast' predicts numbers of a series and no words; use the class ...ForTimeSeriesPrediction, or"
            " another head such as 'linear'."
        )

    def build_forecast(self, config) -> ForecastHead:
        """The module of models that forecast."""
        return ForecastHead(config, self)
