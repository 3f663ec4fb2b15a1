# SPDX-License-Identifier: Apache-2.0
"""Pictures of what a model of images has learned: held-out images next to what it makes of a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.colors import picture_of
from .randomness import preserved_randomness

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..ops.common.token_grid import TokenGrid

PICTURES_FILE = "images.png"
SIDE = 96  # pixels that an image is shown with, about
GREY = 0.0  # of what is hidden, in [-1, 1]


def zoom_of(size: tuple[int, int]) -> int:
    return max(1, SIDE // max(size))


def shown(pixels: Tensor, zoom: int) -> Image:
    """[C, H, W] in [-1, 1] as a picture."""
    import PIL.Image

    made = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    made = made.expand(3, -1, -1).repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    return PIL.Image.fromarray(made.permute(1, 2, 0).contiguous().numpy())


def sheet(rows: Sequence[Sequence[Image]], gap: int = 4) -> Image:
    """Pictures of one size in rows and columns, on white."""
    import PIL.Image

    width, height = rows[0][0].size
    columns = max(map(len, rows))
    size = (columns * (width + gap) + gap, len(rows) * (height + gap) + gap)
    made = PIL.Image.new("RGB", size, "white")
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            made.paste(picture, (gap + column * (width + gap), gap + row * (height + gap)))
    return made


@torch.no_grad()
def reconstructions(model: Any, batch: dict[str, Tensor]) -> Image:
    """A row for each image: as it is, with its hidden patches gray, and with what the model puts there."""
    images, hidden = batch["pixel_values"], batch["bool_masked_pos"].bool()
    made = model(**{name: value.to(model.device) for name, value in batch.items()}).reconstruction.float().cpu()
    tall, wide = model.config.patch_shape
    grid = (images.shape[2] // tall, images.shape[3] // wide)
    covers = hidden.view(-1, 1, *grid).repeat_interleave(tall, 2).repeat_interleave(wide, 3)
    zoom = zoom_of((images.shape[2], images.shape[3]))
    columns = (images, images.masked_fill(covers, GREY), torch.where(covers, made, images))
    return sheet([[shown(column[row], zoom) for column in columns] for row in range(len(images))])


@torch.no_grad()
def continuations(
    model: Any, rows: Tensor, clusters: Any, size: tuple[int, int], grid: TokenGrid | None, seed: int
) -> Image:
    """A row for each image of `rows` [B, T], the tokens of whole images: as it is, its first half, and that half as
    the model continues, with colors that are drawn as it finds them probable."""
    pixels, colors = size[0] * size[1], len(clusters)
    first = rows.shape[1] - pixels  # the token that starts an image, where there is one
    half = first + pixels // 2
    outputs = model.config.head.num_outputs(model.config)
    with preserved_randomness():
        torch.manual_seed(seed)
        made = model.generate(
            rows[:, :half].to(model.device),
            attention_mask=torch.ones_like(rows[:, :half]).to(model.device),
            max_new_tokens=rows.shape[1] - half,
            do_sample=True,
            top_k=0,
            suppress_tokens=list(range(colors, outputs)) or None,
        ).cpu()
    zoom, given = zoom_of(size), torch.arange(pixels) < pixels // 2

    def by_rows(tokens: Tensor) -> Tensor:
        return tokens if grid is None else grid.by_rows(tokens[None])[0]

    table = []
    for row, whole in zip(rows[:, first:], made[:, first:]):
        truth, written = (picture_of(by_rows(ids), clusters, size, zoom) for ids in (row, whole))
        color = torch.as_tensor(clusters)[by_rows(row)]
        part = torch.where(by_rows(given)[:, None], color, GREY).view(*size, 3).permute(2, 0, 1)
        table.append([truth, shown(part.float(), zoom), written])
    return sheet(table)


def write_pictures(folder: Path, picture: Image) -> Path:
    path = folder / PICTURES_FILE
    picture.save(path)
    return path
