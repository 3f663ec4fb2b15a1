# SPDX-License-Identifier: Apache-2.0
"""Forecasting of time series: an encoder reads the past, and a decoder writes all future steps at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.hand_overs import HandOver
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel


def forecasting_config(config: Any) -> Any:
    """`config` as a model that forecasts has it: an encoder-decoder with embedding `series` and head `forecast`, with
    their defaults where the config has other ones; a copy when that changes anything.

    Raises:
        ValueError: one of the two without the other.
    """
    series, forecast = (HandOver.SERIES in each for each in (config.embedding.gives, config.head.reads))
    if series and forecast and config.is_encoder_decoder:
        return config
    fields: dict[str, Any] = {"is_decoder": False, "is_encoder_decoder": True}
    if not series:
        fields["embedding"] = "series"
    if not forecast:
        fields["head"] = "forecast"
    own = config.to_dict().get("decoder") or {}
    decoder = {key: value for key, value in own.items() if key not in ("embedding", "head")}
    return config.changed(**fields, decoder=decoder or None)


class XFormerForTimeSeriesPrediction(XFormerPreTrainedModel):
    """Forecasts of a time series."""

    main_input_name = "past_values"
    input_modalities = ["time"]

    def __init__(self, config: XFormerConfig):
        config = forecasting_config(config)
        super().__init__(config)
        self.model = XFormerModel(config, add_pooling_layer=False)
        self.model.under_a_head = True
        self.head = config.head.build_forecast(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        past_values: Tensor | None = None,
        past_time_features: Tensor | None = None,
        future_values: Tensor | None = None,
        future_time_features: Tensor | None = None,
        past_observed_mask: Tensor | None = None,
        future_observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerForecastOutput:
        """One pass of both towers: the decoder reads the last `label_length` values, then zeros for the steps to come,
        all with features of their times (Zhou et al. 2021, arXiv 2012.07436, section 3.3).

        Args:
            past_values: [B, context_length, channels], or [B, context_length] of one channel.
            past_time_features, future_time_features: [B, context_length, F] and [B, prediction_length, F], as many as
                the embedding's `time_features`; left out where that is 0.
            future_values: [B, prediction_length, channels], the true ones; with them there is a loss.
            past_observed_mask, future_observed_mask: like the values, 1 = known. Others count as the mean, and in no
                statistic and no loss.

        Raises:
            ValueError: tensors of other lengths, channels or features than the config says.
        """
        if past_values is None:
            raise ValueError("Give `past_values` [batch, length, channels].")
        spec = self.config.head
        one = past_values.ndim == 2  # of one channel, with no axis for it
        past, seen = self._series("past", past_values, past_observed_mask, spec.context_length)
        scaling = spec.scale_of(past, seen)
        scaled = (past.to(scaling.location.dtype) - scaling.location) / scaling.spread
        scaled = scaled if seen is None else scaled.masked_fill(~seen, 0.0)
        known = spec.known_length
        empty = F.pad(scaled[:, scaled.shape[1] - known :], (0, 0, 0, spec.prediction_length))
        features = None
        if future_time_features is not None or past_time_features is not None:
            features = self._joined(past_time_features, future_time_features, known)
        trunk, decoder = self.model.get_encoder(), self.model.get_decoder()
        base = self.model(
            inputs_embeds=trunk.embedding.vectors(scaled, past_time_features),
            decoder_inputs_embeds=decoder.embedding.vectors(empty, features),
            use_cache=False,
            **kwargs,
        )
        parameters = self.head(base.last_hidden_state[:, -spec.prediction_length :])
        loss = None
        if future_values is not None:
            future, counted = self._series("future", future_values, future_observed_mask, spec.prediction_length)
            target = (future.to(scaling.location.dtype) - scaling.location) / scaling.spread
            target = target if counted is None else target.masked_fill(~counted, 0.0)
            loss = self.head.loss(parameters, target, counted)
        forecast = parameters[0] * scaling.spread + scaling.location
        return outputs.XFormerForecastOutput(
            loss=self.with_aux_losses(loss, base),
            prediction_outputs=forecast[..., 0] if one else forecast,
            params=parameters,
            loc=scaling.location,
            scale=scaling.spread,
            decoder_hidden_states=base.decoder_hidden_states,
            decoder_attentions=base.decoder_attentions,
            cross_attentions=base.cross_attentions,
            encoder_last_hidden_state=base.encoder_last_hidden_state,
            encoder_hidden_states=base.encoder_hidden_states,
            encoder_attentions=base.encoder_attentions,
            aux_losses=self.reported(base.aux_losses, loss),
        )

    def _series(self, name: str, values: Tensor, observed: Tensor | None, length: int) -> tuple[Tensor, Tensor | None]:
        """Values [B, T, channels] and which of them are known, boolean."""
        values = values[..., None] if values.ndim == 2 else values
        if observed is not None and observed.ndim == 2:
            observed = observed[..., None]
        channels = self.config.embedding.channels
        if tuple(values.shape[1:]) != (length, channels):
            raise ValueError(
                f"`{name}_values` must be [batch, {length} steps, {channels} channels], as `head` and `embedding` of"
                f" the config say, got {list(values.shape)}."
            )
        if observed is None:
            return values, None
        if observed.shape != values.shape:
            raise ValueError(
                f"`{name}_observed_mask` must be like the values, {list(values.shape)}, got {list(observed.shape)}."
            )
        return values.masked_fill(observed == 0, 0.0), observed != 0

    @staticmethod
    def _joined(past: Tensor | None, future: Tensor | None, known: int) -> Tensor:
        """The time features of the decoder's steps."""
        if past is None or future is None:
            missing = "past" if past is None else "future"
            raise ValueError(f"`{missing}_time_features` are missing, which the model reads besides the others.")
        return torch.cat([past[:, past.shape[1] - known :], future], dim=1)
