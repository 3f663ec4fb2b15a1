# SPDX-License-Identifier: Apache-2.0
"""Masked image modeling: the pixels of hidden patches from the others (Xie et al. 2022, SimMIM, arXiv 2111.09886)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.components import bounded
from .base import Objective, SeededCollator, keyed_generator, register


class MaskedImageCollator(SeededCollator):
    """Batches with `pixel_values` [B, C, H, W], scaled as the image processor does, and `bool_masked_pos` [B, N], 1
    = hidden, of the model's patches, row by row. Features have `pixel_values` [C, H, W] in bytes.

    patch: height and width of the model's patches in pixels. Which patches of an image are hidden depends on the seed,
    the epoch and the image alone.
    """

    def __init__(
        self,
        objective: MaskedImageObjective,
        processor: Any,
        patch: tuple[int, int],
        seed: int = 0,
        static: bool = False,
    ) -> None:
        super().__init__(seed, static)
        self.objective, self.processor, self.patch = objective, processor, patch

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        images = [feature["pixel_values"] for feature in features]
        masks = [self.mask(image) for image in images]
        scaled = self.processor(images=images, do_resize=False, return_tensors="pt")["pixel_values"]
        return {"pixel_values": scaled, "bool_masked_pos": torch.stack(masks).long()}

    def mask(self, image: Tensor) -> Tensor:
        """[C, H, W] -> [N] boolean."""
        generator = keyed_generator(self.seed, 0 if self.static else self.epoch, image.flatten())
        grid = (image.shape[1] // self.patch[0], image.shape[2] // self.patch[1])
        return self.objective.drawn(grid, generator).flatten()


@register("masked_image")
class MaskedImageObjective(Objective):
    """Hide a share of an image's patches and predict their pixels, by the mean absolute error.

    mask_ratio: share of the patches that is hidden. mask_size: patches of the model, on a side, that are hidden
    together (SimMIM hides 32 x 32 pixels, which are 2 patches of 16).
    """

    summary: ClassVar[str] = "the pixels of hidden patches of an image, from the others (SimMIM)"
    corrupts: ClassVar[str] = "a learned vector stands in place of each of them"
    head: ClassVar[str] = "MaskedImageModeling"
    rows = "images"
    target = "patch"

    mask_ratio: float = bounded(0.6, above=0, below=1)
    mask_size: int = bounded(1, least=1)

    def bound_to(self, config: Any) -> MaskedImageObjective:
        rows, columns = config.grid
        size = self.mask_size
        if rows % size or columns % size or rows * columns == size * size:
            raise ValueError(
                f"objective 'masked_image' hides squares of mask_size {size} x {size} patches, which do not divide a"
                f" grid of {rows} x {columns} in two or more; take another --objective.mask_size, --patch_size or"
                " --resize"
            )
        return self

    def drawn(self, grid: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Which patches of a grid are hidden, [rows, columns] boolean: `mask_ratio` of them, at least one square, and
        not all."""
        rows, columns = grid[0] // self.mask_size, grid[1] // self.mask_size
        total = rows * columns
        count = min(max(round(self.mask_ratio * total), 1), total - 1)
        hidden = torch.zeros(total, dtype=torch.bool)
        hidden[torch.randperm(total, generator=generator)[:count]] = True
        square = hidden.view(rows, columns)
        return square.repeat_interleave(self.mask_size, 0).repeat_interleave(self.mask_size, 1)

    def collator(  # type: ignore[override]
        self, tokenizer: Any, *, seed: int = 0, static: bool = False, patch: tuple[int, int] = (16, 16)
    ) -> MaskedImageCollator:
        """tokenizer: an image processor. patch: of the model, in pixels."""
        return MaskedImageCollator(self, tokenizer, patch, seed=seed, static=static)
