# SPDX-License-Identifier: Apache-2.0
"""The configuration of X-formers that read images."""

from __future__ import annotations

from typing import ClassVar

from .configuration_xformer import XFormerConfig
from .core.components import SpecLike


class XFormerImageConfig(XFormerConfig):
    """Fields of an X-former whose input is an image; base of the families that read images. Token fields
    (`vocab_size`, special tokens) have no effect.

    image_size: pixels, one number for squares or (height, width). patch_size: pixels, alike; divides `image_size`.
    num_channels: of the image.
    """

    modality: ClassVar[str] = "image"

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    embedding: SpecLike = "patch"
    position: SpecLike = "none"  # the patch embedding has positions on the grid

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return pair("image_size", self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return pair("patch_size", self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (tall, wide) = self.image_shape, self.patch_shape
        return height // tall, width // wide

    @property
    def encoder_stride(self) -> int:
        """Side of the squares of pixels that masked patches are predicted in, which are the patches themselves here
        (transformers' field, which its `run_mim.py` reads and sets)."""
        return self.patch_shape[0]

    @encoder_stride.setter
    def encoder_stride(self, value: int) -> None:
        if value not in self.patch_shape:
            raise ValueError(
                f"`encoder_stride` is {value}, and pixels are predicted by patches, of `patch_size` {self.patch_size};"
                " leave it out."
            )

    def check_layers(self) -> None:
        super().check_layers()
        for size, patch in zip(self.image_shape, self.patch_shape, strict=True):
            if size % patch:
                raise ValueError(
                    f"`image_size` {self.image_size} is not a multiple of `patch_size` {self.patch_size}; change one"
                    " of them."
                )
        if self.num_channels < 1:
            raise ValueError(f"`num_channels` must be at least 1, got {self.num_channels}.")


def pair(name: str, value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """One number for both sides, or (height, width).

    Raises:
        ValueError: not one or two positive numbers.
    """
    sides = (value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"`{name}` is a number of pixels or (height, width), each at least 1; got {value}.")
    return sides
