# SPDX-License-Identifier: Apache-2.0
"""Image processors of models that read patches."""

from __future__ import annotations

from typing import Any


def patch_processor(size: tuple[int, int], channels: int) -> Any:
    """An image processor that resizes to `size` (height, width) and brings pixels to [-1, 1]: transformers' for Vision
    Transformers; of one channel, what makes pictures gray before that."""
    from ..compat import ViTImageProcessorPil

    if channels == 1:
        from .grey_images import GreyImageProcessor

        made: Any = GreyImageProcessor
    else:
        made = ViTImageProcessorPil
    middle = [0.5] * channels
    return made(size={"height": size[0], "width": size[1]}, image_mean=middle, image_std=middle)
