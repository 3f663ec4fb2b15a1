# SPDX-License-Identifier: Apache-2.0
"""Time series: numbers of several channels, and features of their times, in place of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.components import register
from ..core.hand_overs import HandOver
from .base import EmbeddingSpec, InputPosition


class SeriesEmbedding(nn.Module):
    """x_t = Conv1d(u)_t + W f_t + position(t), then dropout (Zhou et al. 2021, arXiv 2012.07436, appendix B).

    u [B, T, channels] are scaled values, f [B, T, features] features of their times. The convolution reads `kernel`
    values around each, zeros beyond the ends (the released code: the other end).

    `tokens` (the convolution) stands where a token table stands in a text model.
    """

    def __init__(self, config, spec: SeriesEmbeddingSpec):
        super().__init__()
        width, self.spec = config.hidden_size, spec
        self.tokens = nn.Conv1d(spec.channels, width, spec.kernel, padding=spec.kernel // 2, bias=False)
        self.times = nn.Linear(spec.time_features, width, bias=False) if spec.time_features else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        # Values have variance 1, and so have what is made of them: positions are no louder.
        init.normal_(self.tokens.weight, mean=0.0, std=(self.spec.kernel * self.spec.channels) ** -0.5)
        if self.times is not None:
            init.normal_(self.times.weight, mean=0.0, std=self.spec.time_features**-0.5)

    def lookup(self, input_ids: Tensor) -> Tensor:
        raise ValueError("A model with series embedding reads numbers; give `past_values` instead of `input_ids`.")

    def vectors(self, values: Tensor, time_features: Tensor | None) -> Tensor:
        """values [B, T, channels], time_features [B, T, features] or None -> [B, T, D]: what `inputs_embeds` holds.

        Raises:
            ValueError: other channels or features than the model has.
        """
        if values.ndim != 3 or values.shape[2] != self.spec.channels:
            raise ValueError(
                f"Values must be [batch, length, {self.spec.channels} channels], got {list(values.shape)}."
            )
        given = 0 if time_features is None else time_features.shape[-1]
        if given != self.spec.time_features or (time_features is not None and time_features.ndim != 3):
            shape = None if time_features is None else list(time_features.shape)
            raise ValueError(
                f"Time features must be [batch, length, {self.spec.time_features}], as the embedding's"
                f" `time_features` says, got {shape}."
            )
        dtype = self.tokens.weight.dtype
        found = self.tokens(values.to(dtype).transpose(1, 2)).transpose(1, 2)
        if self.times is None or time_features is None:
            return found
        if time_features.shape[1] != values.shape[1]:
            raise ValueError(
                f"There are time features for {time_features.shape[1]} steps, and values for {values.shape[1]}; give"
                " as many of both."
            )
        return found + self.times(time_features.to(dtype))

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, D] from [`SeriesEmbedding.vectors`] -> [B, T, D]."""
        if token_type_ids is not None:
            raise ValueError("A time series has no `token_type_ids`; leave them out.")
        return self.dropout(position.embed(inputs_embeds, positions))


@register("embedding", "series")
class SeriesEmbeddingSpec(EmbeddingSpec):
    """channels: numbers of each time step. time_features: numbers that tell its time. kernel: values, an odd number,
    that the convolution reads for each step."""

    summary = "values of a time series, by convolution, and features of their times"

    gives = frozenset({HandOver.SERIES})

    channels: int = 1
    time_features: int = 0
    kernel: int = 3

    def check_fields(self) -> None:
        if self.channels < 1 or self.time_features < 0:
            raise ValueError(
                f"embedding 'series' needs `channels` >= 1 and `time_features` >= 0, got {self.channels} and"
                f" {self.time_features}."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"embedding 'series' needs an odd `kernel` >= 1, got {self.kernel}.")

    def check(self, config) -> None:
        if HandOver.SERIES not in config.head.reads or not config.is_encoder_decoder:
            raise ValueError(
                "embedding 'series' reads numbers, for models that forecast: use the class ...ForTimeSeriesPrediction,"
                " or set `head='forecast'` and `is_encoder_decoder=True`."
            )

    def tables(self, config) -> tuple[str, ...]:
        return ()

    def build(self, config, **where) -> SeriesEmbedding:
        return SeriesEmbedding(config, self)
