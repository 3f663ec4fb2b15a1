# SPDX-License-Identifier: Apache-2.0
"""Patch embedding: an image as a sequence of its patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.components import register
from ..core.reading_weights import weight_of
from ..core.weight_decay import Undecayed
from .base import EmbeddingSpec, InputPosition


class PatchEmbedding(Undecayed, nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos (Dosovitskiy et al. 2021, arXiv 2010.11929, eq. 1); with a
    distillation token [x_class; x_distill; x_1 E; ...] (Touvron et al. 2021, arXiv 2012.12877, section 4).

    x_i is the i-th patch in row-major order with all its channels, E (with a bias) a linear map, computed as a
    convolution whose stride is its width. E_pos [1 + N, D] (2 + N with a distillation token) is learned. For an image
    of another size it is resized as a 2-D grid, the rows of tokens that are no patches kept as they are (section 3.2):
    bicubic, by pixel centers, as transformers' ViT does it.

    `tokens` (the convolution) stands where a token table stands in a text model.
    """

    undecayed = ("class_token", "distillation_token")

    def __init__(self, config, spec: PatchEmbeddingSpec):
        super().__init__()
        width = config.hidden_size
        self.channels, self.patch, self.image, self.grid = (
            config.num_channels,
            config.patch_shape,
            config.image_shape,
            config.grid,
        )
        self.tokens = nn.Conv2d(config.num_channels, width, kernel_size=self.patch, stride=self.patch)
        self.class_token = nn.Parameter(torch.zeros(width)) if spec.class_token else None
        self.distillation_token = nn.Parameter(torch.zeros(width)) if spec.distillation_token else None
        self.leading = spec.leading_tokens
        count = self.grid[0] * self.grid[1] + self.leading
        self.positions = nn.Parameter(torch.zeros(count, width)) if spec.positions else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        for token in (self.class_token, self.distillation_token):
            if token is not None:
                init.zeros_(token)
        if self.positions is not None:
            init.normal_(self.positions, mean=0.0, std=config.initializer_range)

    def lookup(self, input_ids: Tensor) -> Tensor:
        raise ValueError("A model with patch embedding reads images; give `pixel_values` instead of `input_ids`.")

    def grid_positions(self, rows: int, columns: int) -> Tensor:
        """E_pos for a grid of patches, [leading + rows * columns, D], of an embedding that has it."""
        own = weight_of(self, "positions")
        if (rows, columns) == self.grid:
            return own
        table = own[self.leading :].view(1, *self.grid, -1).permute(0, 3, 1, 2)
        wide = table if table.dtype == torch.float64 else table.float()
        resized = F.interpolate(wide, size=(rows, columns), mode="bicubic", align_corners=False)
        patches = resized.to(table.dtype).permute(0, 2, 3, 1).flatten(0, 2)
        return torch.cat([own[: self.leading], patches])

    def patches(
        self, pixel_values: Tensor, interpolate: bool = False, hidden: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """pixel_values [B, C, H, W] -> [B, leading + N, D], positions included: what `inputs_embeds` holds.

        interpolate: allow images of another size than the config's `image_size`, by resizing the positions.
        hidden: which patches are hidden [B, N] boolean, and the vector that stands in their place [D].

        Raises:
            ValueError: other channels, a size that patches do not fill, or another size without `interpolate`.
        """
        self.check_size(pixel_values, interpolate)
        vectors = self.vectors(pixel_values.to(self.tokens.weight.dtype))
        if hidden is not None:
            vectors = torch.where(hidden[0][..., None], hidden[1].to(vectors.dtype), vectors)
        grid = (pixel_values.shape[2] // self.patch[0], pixel_values.shape[3] // self.patch[1])
        return self.with_positions(vectors, grid)

    def check_size(self, pixel_values: Tensor, interpolate: bool) -> None:
        """Refuses what [`PatchEmbedding.patches`] does."""
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.channels:
            raise ValueError(
                f"`pixel_values` must be [batch, {self.channels} channels, height, width], got"
                f" {list(pixel_values.shape)}."
            )
        size = tuple(pixel_values.shape[2:])
        if size != self.image and self.positions is not None and not interpolate:
            raise ValueError(
                f"The image has {size[0]} x {size[1]} pixels, but positions are for {self.image[0]} x {self.image[1]};"
                " resize it, or give `interpolate_pos_encoding=True` to resize the positions."
            )
        if size[0] % self.patch[0] or size[1] % self.patch[1]:
            raise ValueError(
                f"Patches of {self.patch[0]} x {self.patch[1]} pixels do not fill an image of {size[0]} x {size[1]};"
                " crop or resize it."
            )

    def vectors(self, pixel_values: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D], one for each patch."""
        return self.tokens(pixel_values).flatten(2).transpose(1, 2)

    def with_positions(self, vectors: Tensor, grid: tuple[int, int]) -> Tensor:
        """The vectors of the patches of a grid [B, N, D] -> [B, leading + N, D] with what stands before, and
        positions."""
        learned = (name for name in ("class_token", "distillation_token") if getattr(self, name) is not None)
        leading = [weight_of(self, name).expand(vectors.shape[0], 1, -1) for name in learned]
        vectors = torch.cat([*leading, vectors], dim=1)
        if self.positions is not None:
            vectors = vectors + self.grid_positions(*grid)
        return vectors

    def read(
        self, pixel_values: Tensor, interpolate: bool = False, hidden: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As [`PatchEmbedding.patches`], with further inputs of the layers that are made of the image."""
        return self.patches(pixel_values, interpolate, hidden), {}

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, D] from [`PatchEmbedding.patches`] -> [B, T, D]."""
        if token_type_ids is not None:
            raise ValueError("Patches have no `token_type_ids`; leave them out.")
        return self.dropout(position.embed(inputs_embeds, positions))


@register("embedding", "patch")
class PatchEmbeddingSpec(EmbeddingSpec):
    """class_token: a learned vector before the patches, whose state stands for the image. positions: a learned vector
    for each cell of the grid and each token before. distillation_token: a second vector after the class token, whose
    state learns what a teacher says (DeiT)."""

    summary = "patches of an image, a class token and learned positions"

    class_token: bool = True
    positions: bool = True
    distillation_token: bool = False

    @property
    def leading_tokens(self) -> int:
        """How many tokens stand before the patches."""
        return int(self.class_token) + int(self.distillation_token)

    def check_fields(self) -> None:
        if self.distillation_token and not self.class_token:
            raise ValueError(
                "embedding 'patch' has a distillation token next to a class token alone; set `class_token=True`."
            )

    def check(self, config) -> None:
        if config.modality != "image":
            raise ValueError(
                "embedding 'patch' needs `image_size`, `patch_size` and `num_channels`; use a config of images, e.g. "
                "XFVisionTransformerConfig."
            )

    def build(self, config, **where) -> PatchEmbedding:
        if config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                "embedding 'patch' is an encoder's; set `is_decoder=False` and `is_encoder_decoder=False`."
            )
        return PatchEmbedding(config, self)
