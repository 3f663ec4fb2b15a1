# SPDX-License-Identifier: Apache-2.0
"""Pictures in gray or in three colors, whatever they are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

WHITE, WHITE_OF_16_BITS = 255, 65535


def check_mode(picture: Image) -> None:
    """Raises ValueError for numbers that no black and white are known for."""
    remedy = "save it with 8 or 16 bits a channel"
    if picture.mode == "F":
        raise ValueError(f"mode 'F' has fractions, of which nothing says what is black and what is white; {remedy}")
    if picture.mode == "I":
        levels = np.asarray(picture)
        low, high = int(levels.min()), int(levels.max())
        # Up to 255 they are more often bytes than the darkest 255 of 65535 levels.
        if low < 0 or high > WHITE_OF_16_BITS or 0 < high <= WHITE:
            raise ValueError(
                f"mode 'I' has 32 bits, of which these use {low} to {high}, and nothing says what is white; {remedy}"
            )


def as_mode(picture: Image, mode: str) -> Image:
    """A picture in mode "L" or "RGB". 16 bits become the 8 highest, rounded, where Pillow by itself makes all that is
    brighter than 255 white. Raises ValueError as [`check_mode`]."""
    import PIL.Image

    check_mode(picture)
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        levels = np.asarray(picture).astype(np.int64)
        scale = WHITE_OF_16_BITS // WHITE
        picture = PIL.Image.fromarray(((levels + scale // 2) // scale).astype(np.uint8))
    return picture.convert(mode)
