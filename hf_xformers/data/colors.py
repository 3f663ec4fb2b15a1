# SPDX-License-Identifier: Apache-2.0
"""Colors as tokens: clusters of pixels, which are stored with a model, and pictures of what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..ops.bucketed.kmeans import sums_of_clusters
from .picture_modes import as_mode

if TYPE_CHECKING:
    from PIL.Image import Image


def nearest_colors(pixels: Tensor, clusters: Tensor) -> Tensor:
    """The number of the nearest cluster [N] of each pixel [N, 3], of clusters [K, 3]; the first of equal ones."""
    return torch.cdist(pixels.double(), clusters.double(), compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)


def color_clusters(pixels: Tensor, count: int, *, seed: int = 0, rounds: int = 30) -> Tensor:
    """k-means of colors (Lloyd 1982; Chen et al. 2020, section 3: 512 clusters of pixels of the training images).

    pixels [N, 3] in [-1, 1] -> clusters [count, 3]. Begins with pixels that are drawn in proportion to their squared
    distance to those drawn already (Arthur & Vassilvitskii 2007), and stops where nothing moves, after at most
    `rounds` rounds. A cluster that nobody is near keeps its place.

    Raises:
        ValueError: fewer different colors than clusters.
    """
    pixels = pixels.reshape(-1, 3).double()
    different = pixels.unique(dim=0)
    if len(different) < count:
        raise ValueError(
            f"the images have {len(different)} colors, fewer than {count} clusters; take at most {len(different)}"
        )
    generator = torch.Generator().manual_seed(seed)
    clusters = pixels[torch.randint(len(pixels), (1,), generator=generator)]
    distance = (pixels - clusters[0]).square().sum(-1)
    while len(clusters) < count:
        chosen = pixels[torch.multinomial(distance / distance.sum(), 1, generator=generator)]
        clusters = torch.cat([clusters, chosen])
        distance = torch.minimum(distance, (pixels - chosen[0]).square().sum(-1))
    for _ in range(rounds):
        found = sums_of_clusters(pixels[None, None], nearest_colors(pixels, clusters)[None, None], count, None)
        means = found.sums[0] / found.counts[0].clamp(min=1)[:, None]
        moved = torch.where(found.counts[0][:, None] > 0, means, clusters)
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return clusters.float()


def pixels_of(images: Sequence[Image], size: tuple[int, int]) -> Tensor:
    """Images as [N, H, W, 3] in [-1, 1], resized to `size` (height, width) as [`color_processor`] does."""
    import PIL.Image

    pictures = [as_mode(image, "RGB") for image in images]
    resized = [picture.resize((size[1], size[0]), PIL.Image.Resampling.BILINEAR) for picture in pictures]
    return torch.from_numpy(np.stack([np.asarray(image) for image in resized]).astype(np.float32) / 127.5 - 1.0)


def color_processor(clusters: Tensor, size: tuple[int, int]) -> Any:
    """transformers' image processor that makes ids of images, to be saved with the model: `input_ids` [B, H W]."""
    import transformers

    made = getattr(transformers, "ImageGPTImageProcessorPil", None) or transformers.ImageGPTImageProcessor
    return made(clusters=clusters.tolist(), size={"height": size[0], "width": size[1]})


def picture_of(ids: Tensor | Sequence[int], clusters: Any, size: tuple[int, int], zoom: int = 1) -> Image:
    """The picture of an image's ids [H W], row by row, each pixel `zoom` pixels wide.

    Raises:
        ValueError: another number of ids than pixels, or an id without a color.
    """
    import PIL.Image

    numbers, table = np.asarray(ids), np.asarray(clusters)
    if numbers.shape != (size[0] * size[1],) or numbers.min() < 0 or numbers.max() >= len(table):
        raise ValueError(
            f"an image of {size[0]} x {size[1]} pixels is {size[0] * size[1]} ids from 0 to {len(table) - 1}, got"
            f" {numbers.shape} from {numbers.min()} to {numbers.max()}; leave out the token that begins it"
        )
    colors = np.clip(np.round((table[numbers] + 1.0) * 127.5), 0, 255).astype(np.uint8).reshape(*size, 3)
    return PIL.Image.fromarray(colors.repeat(zoom, 0).repeat(zoom, 1))
