# SPDX-License-Identifier: Apache-2.0
"""Patch embedding at two levels: the pixels inside each patch, and the patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import State
from ..core.reading_weights import weight_of
from .base import InputPosition
from .patch import PatchEmbedding, PatchEmbeddingSpec

PIXELS = "pixel_states"  # the input with the states of pixels [B, N, m, c]


class PixelStates(State):
    """The states of pixels as layers change them, [B, N, m, c]."""

    states: Tensor


class PixelPatchEmbedding(PatchEmbedding):
    """TNT's input (Han et al. 2021, arXiv 2103.00112, section 2.2): every patch is read by a convolution of 7 x 7 with
    a stride of its own, which gives m = (P / stride)^2 pixel vectors of width c, to which learned positions inside the
    patch are added: Y [N, m, c]. A patch's vector is LN(W LN(vec(Y_i))); class token and positions as in ViT.

    The convolution sees one patch at a time, as in timm's present models; pixels outside the patch count as 0.
    """

    def __init__(self, config, spec: PixelPatchSpec):
        super().__init__(config, spec)
        self.stride, width = spec.inner_stride, spec.inner_width
        self.inner = spec.inner_grid(config)
        count = self.inner[0] * self.inner[1] * width
        self.tokens = nn.Conv2d(config.num_channels, width, kernel_size=7, padding=3, stride=self.stride)
        self.pixel_positions = nn.Parameter(torch.zeros(width, *self.inner))
        self.pixel_norm = config.normalization.build(config, width=count)
        self.join = nn.Linear(count, config.hidden_size)
        self.patch_norm = config.normalization.build(config)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.normal_(self.pixel_positions, mean=0.0, std=config.initializer_range)

    def pixels(self, pixel_values: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, m, c]; both grids in row-major order."""
        batch, channels = pixel_values.shape[:2]
        tall, wide = self.patch
        cut = pixel_values.unfold(2, tall, tall).unfold(3, wide, wide)  # [B, C, rows, columns, P, P]
        cut = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels, tall, wide)
        states = self.tokens(cut) + weight_of(self, "pixel_positions")
        return states.flatten(2).transpose(1, 2).reshape(batch, -1, self.inner[0] * self.inner[1], states.shape[1])

    def vectors(self, pixel_values: Tensor) -> Tensor:
        return self.of_pixels(self.pixels(pixel_values))

    def of_pixels(self, states: Tensor) -> Tensor:
        """[B, N, m, c] -> [B, N, D]."""
        return self.patch_norm(self.join(self.pixel_norm(states.flatten(2))))

    def read(
        self, pixel_values: Tensor, interpolate: bool = False, hidden: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if hidden is not None:
            raise ValueError(
                "A model that reads the pixels inside patches cannot hide patches; use the embedding 'patch'."
            )
        self.check_size(pixel_values, interpolate)
        states = self.pixels(pixel_values.to(self.tokens.weight.dtype))
        grid = (pixel_values.shape[2] // self.patch[0], pixel_values.shape[3] // self.patch[1])
        return self.with_positions(self.of_pixels(states), grid), {PIXELS: states}

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None,
        positions: Tensor,
        position: InputPosition,
        pixel_states: Tensor | None = None,
    ) -> Tensor:
        """As of patches; pixel_states is for the layers."""
        return super().forward(inputs_embeds, token_type_ids, positions, position)


@register("embedding", "pixel_patch")
class PixelPatchSpec(PatchEmbeddingSpec):
    """inner_width: c, of a pixel's vector. inner_stride: pixels of the image from one pixel vector to the next, which
    divides the patches' sides. The rest is as for `patch`."""

    inputs = (PIXELS,)
    gives = frozenset({HandOver.PIXELS})
    summary = "patches of an image and the pixels inside each of them"

    inner_width: int = bounded(24, least=1)
    inner_stride: int = bounded(4, least=1)

    def inner_grid(self, config) -> tuple[int, int]:
        """Rows and columns of pixel vectors in a patch."""
        tall, wide = config.patch_shape
        return tall // self.inner_stride, wide // self.inner_stride

    def check(self, config) -> None:
        super().check(config)
        if any(side % self.inner_stride for side in config.patch_shape):
            raise ValueError(
                f"embedding 'pixel_patch' reads a pixel vector every {self.inner_stride} pixels, which does not divide"
                f" `patch_size` {config.patch_size}; change `inner_stride` or `patch_size`."
            )

    def build(self, config, **where) -> PixelPatchEmbedding:
        super().build(config, **where)  # refuses decoders
        return PixelPatchEmbedding(config, self)
