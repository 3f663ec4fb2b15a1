# SPDX-License-Identifier: Apache-2.0
"""Local attention of the Image Transformer: along the sequence of pixels, or on the plane."""

from __future__ import annotations

import math
from typing import Any, Literal

from ..core.components import bounded, register
from ..ops.block_sparse.pattern_images import block_memory, block_plane
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.token_grid import TokenGrid
from .shared.pattern_spec import BlockSparseSpec


@register("attention", "image_transformer")
class ImageTransformerSpec(BlockSparseSpec):
    """Blocks of queries that share a memory of what is near them (Parmar et al. 2018, arXiv 1802.05751, sections 3.2
    and 3.3). An image of h x w pixels with c channels is a text of h w c tokens, one for each intensity: a plane of h
    rows and w c columns.

    - 1d: the text goes through the plane row by row; a query reads its own block of `block_length` tokens and
      `memory_length` tokens before it;
    - 2d: the text goes through it block by block, row by row inside a block; a query reads its own block and a flange
      above, on the left and on the right.

    A decoder reads of these what comes before in the text, which is the order of generation: the right side of the
    flange is read where it lies above. An encoder (unmasked, not in the paper) reads the flange on all sides.
    [`TokenGrid`] (`token_grid(config)`) brings images into the order of blocks and back. Time and memory O(T (b + m)
    D) for b tokens in a block and m around it.

    Args:
        local: 1d or 2d.
        block_length, memory_length: tokens (1d).
        image_size, num_channels: height and width in pixels (`None`: the smallest square that max_position_embeddings
            fit into, with sides of a multiple of 8 pixels from 8 on; in a model of images its own).
        block_shape, memory_flange: height and width in tokens (2d; `None`: the largest block up to 16 x 16 that fills
            the plane, and one block above and two on each side).
    """

    summary = "blocks of an image's tokens read what is near, along the text or on the plane"
    not_taken_over = ("block_length",)

    local: Literal["1d", "2d"] = "1d"
    block_length: int = bounded(256, least=1)
    memory_length: int = bounded(256, least=0)
    image_size: tuple[int, int] | None = bounded(None, least=1)
    num_channels: int = bounded(3, least=1)
    block_shape: tuple[int, int] | None = bounded(None, least=1)
    memory_flange: tuple[int, int] | None = bounded(None, least=0)

    def check(self, config) -> None:
        rows, columns = self.plane(config)
        if self.image_size is not None and rows * columns < config.max_position_embeddings:
            raise ValueError(
                f"image_transformer has an `image_size` of {rows * columns} tokens with {self.num_channels} channels,"
                f" but `max_position_embeddings` is {config.max_position_embeddings}; make them agree."
            )
        if config.modality == "image" and config.embedding.leading_tokens:
            raise ValueError(
                "image_transformer reads an image as its grid of patches, in which"
                f" {config.embedding.leading_tokens} tokens before them have no place; set `class_token=False` of the"
                " embedding."
            )
        if self.local == "2d":
            self._check_blocks(config)

    def _check_blocks(self, config) -> None:
        (rows, columns), (height, width), flange = self.plane(config), self.block_of(config), self.flange_of(config)
        if rows % height or columns % width:
            raise ValueError(
                f"image_transformer's blocks of {height} x {width} tokens do not fill a plane of {rows} x {columns};"
                " give a `block_shape` that divides it."
            )
        if config.modality != "image" and (flange[0] % height or flange[1] % width):
            raise ValueError(
                f"image_transformer reads whole blocks of {height} x {width}, of which a `memory_flange` of"
                f" {flange[0]} x {flange[1]} is no multiple; make it one."
            )

    def plane(self, config) -> tuple[int, int]:
        """Rows and columns of tokens."""
        if config.modality == "image":
            return config.grid
        if self.image_size is not None:
            return self.image_size[0], self.image_size[1] * self.num_channels
        side = math.isqrt(max(-(-config.max_position_embeddings // self.num_channels), 1) - 1) + 1
        side = -(-side // 8) * 8 if side > 8 else side  # which blocks of many shapes fill
        return side, side * self.num_channels

    def block_of(self, config) -> tuple[int, int]:
        """Height and width of a block of queries (2d)."""
        if self.block_shape is not None:
            return self.block_shape
        rows, columns = (max(n for n in range(1, 17) if side % n == 0) for side in self.plane(config))
        return rows, columns

    def flange_of(self, config) -> tuple[int, int]:
        """Height and width of what is read around a block (2d)."""
        height, width = self.block_of(config)
        return (height, 2 * width) if self.memory_flange is None else self.memory_flange

    def token_grid(self, config) -> TokenGrid:
        blocks = self.local == "2d" and config.modality != "image"
        return TokenGrid(*self.plane(config), self.block_of(config) if blocks else None)

    def fields_of_plane(self, rows: int, columns: int) -> dict[str, Any]:
        return {"image_size": (rows, columns), "num_channels": 1}

    def pattern(self, config, layer_idx: int) -> Pattern:
        if self.local == "1d":
            return block_memory(self.block_length, self.memory_length, 0 if config.is_decoder else self.memory_length)
        order = "raster" if config.modality == "image" else "blocks"
        given = (self.plane(config)[1], self.block_of(config), self.flange_of(config))
        return block_plane(*given, order=order, below=not config.is_decoder)
