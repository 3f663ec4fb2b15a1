# SPDX-License-Identifier: Apache-2.0
"""Frames of sound in place of tokens: features of short pieces, four of which become one state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..ops.common.real_tokens import real_first
from .base import EmbeddingSpec, InputPosition

# Frames that become one state: two convolutions, each of stride 2.
SUBSAMPLING = 4


def halved(count):
    """How many places a convolution of stride 2 leaves of `count`, numbers or a tensor of them."""
    return (count + 1) // 2


class FrameEmbedding(nn.Module):
    """x_t = W vec(z_t), z = relu(conv(relu(conv(s)))), then dropout (Gulati et al. 2020, arXiv 2005.08100, section
    2: a convolution subsampling layer, then a linear layer and dropout).

    s [B, T, F] are features of frames. Both convolutions have kernels of 3 x 3 over time and frequency, stride 2 and
    zeros beyond the sound, so there are ceil(T / 4) states of ceil(F / 4) numbers in each of `channels`. A state
    reads up to 7 frames.

    Real frames are moved to the beginning of their row first, and padding is made zero before each convolution: then
    it does not matter how much of it there is, nor on which side.

    `tokens` (the linear layer) stands where a token table stands in a text model.
    """

    def __init__(self, config, spec: FrameEmbeddingSpec):
        super().__init__()
        channels = config.hidden_size if spec.channels is None else spec.channels
        self.num_features = config.num_mel_bins
        self.conv_1 = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.conv_2 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.tokens = nn.Linear(channels * halved(halved(self.num_features)), config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        for layer in (self.conv_1, self.conv_2, self.tokens):  # features have variance 1, and so has what follows
            init.normal_(layer.weight, mean=0.0, std=(2.0 / layer.weight[0].numel()) ** 0.5)
            init.zeros_(layer.bias)

    def lookup(self, input_ids: Tensor) -> Tensor:
        raise ValueError("A model with frame embedding reads sound; give `input_features` instead of `input_ids`.")

    def check_features(self, features: Tensor, mask: Tensor | None) -> None:
        """Raises ValueError for features or a mask of another shape than the model reads."""
        if features.ndim != 3 or features.shape[2] != self.num_features or not features.shape[1]:
            raise ValueError(
                f"`input_features` must be [batch, frames, {self.num_features} features], got {list(features.shape)};"
                " make them with the model's feature extractor, or set `num_mel_bins` to theirs."
            )
        if mask is not None and tuple(mask.shape) != tuple(features.shape[:2]):
            raise ValueError(
                f"`attention_mask` must be [batch, frames] = {list(features.shape[:2])}, got {list(mask.shape)}."
            )

    def read(self, features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """features [B, T, F], mask [B, T], 1 = a real frame (None: all are) -> (states [B, ceil(T / 4), D], their mask
        [B, ceil(T / 4)] boolean, or None). Real ones come first in both.

        Raises:
            ValueError: other shapes.
        """
        self.check_features(features, mask)
        states = features.to(self.conv_1.weight.dtype)
        lengths = None
        if mask is not None:
            real = mask.to(features.device) != 0
            order = real_first(real)
            states = states.gather(1, order[..., None].expand_as(states))
            lengths = real.sum(-1)
        states = self._without_padding(states[:, None], lengths)
        for convolution in (self.conv_1, self.conv_2):
            lengths = None if lengths is None else halved(lengths)
            states = self._without_padding(torch.relu(convolution(states)), lengths)
        vectors = self.tokens(states.transpose(1, 2).flatten(2))
        return vectors, None if lengths is None else self._real(vectors.shape[1], lengths)

    @staticmethod
    def _real(length: int, lengths: Tensor) -> Tensor:
        return torch.arange(length, device=lengths.device) < lengths[:, None]

    def _without_padding(self, states: Tensor, lengths: Tensor | None) -> Tensor:
        """[B, C, T, F] with zeros after each row's length [B]."""
        if lengths is None:
            return states
        return states.masked_fill(~self._real(states.shape[2], lengths)[:, None, :, None], 0.0)

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, D] from [`FrameEmbedding.read`] -> [B, T, D]."""
        if token_type_ids is not None:
            raise ValueError("Frames have no `token_type_ids`; leave them out.")
        return self.dropout(position.embed(inputs_embeds, positions))


@register("embedding", "frames")
class FrameEmbeddingSpec(EmbeddingSpec):
    """channels: of the two convolutions (`None`: `hidden_size`)."""

    summary = "frames of sound through two convolutions, four to a state"

    channels: int | None = bounded(None, least=1)

    def check(self, config) -> None:
        if config.modality != "sound":
            raise ValueError("embedding 'frames' needs `num_mel_bins`; use a config of sound, e.g. XFConformerConfig.")

    def build(self, config, **where) -> FrameEmbedding:
        if config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                "embedding 'frames' is an encoder's; set `is_decoder=False` and `is_encoder_decoder=False`."
            )
        return FrameEmbedding(config, self)
