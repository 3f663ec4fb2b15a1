# SPDX-License-Identifier: Apache-2.0
"""What `features` reads where a model reads images: pixels in patches, or colors as tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ..configuration_xformer import XFormerConfig
from ..data.images import content_of, need_pillow
from ..data.picture_modes import as_mode
from ..training.building import longest_input
from ..training.image_pretraining import plane_of
from .feature_reading import FeatureOptions, LayerChoice, Reader
from .image_rows import check_image, hold_out, load_images
from .loading import load_trunk
from .names import IMAGES
from .origin import RowNames

if TYPE_CHECKING:
    from datasets import Dataset

    from .options import TaskData


def reads_images(config: Any) -> TypeGuard[XFormerConfig]:
    """Whether features of this model are of images."""
    return isinstance(config, XFormerConfig) and (config.modality == "image" or config.reads_colors == "only")


class ImageReader(Reader):
    """A saved model that reads images, without gradients and without dropout. A row is the hash of an image's file,
    under which `add` has entered it."""

    def __init__(self, options: FeatureOptions, config: XFormerConfig) -> None:
        from transformers import AutoImageProcessor

        need_pillow()
        self.config = config
        try:
            self.processor = AutoImageProcessor.from_pretrained(options.model)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{options.model!r} has no image processor (preprocessor_config.json), which turns images into what"
                " the model reads; take the folder that pretraining or fine-tuning wrote, or save one there"
            ) from error
        self.model, _ = load_trunk(options.model)
        on_cpu = options.use_cpu or not torch.cuda.is_available()
        self.model = self.model.eval().requires_grad_(False).to("cpu" if on_cpu else "cuda")
        size = self.processor.size
        self.size = (int(size["height"]), int(size["width"]))
        self.by_patches = config.modality == "image"
        self.plane = None if self.by_patches else plane_of(config, self.size)
        self.max_length = self.size[0] * self.size[1] + (self.plane is None)
        if not self.by_patches:
            limit = longest_input(config)
            self.max_length = self.max_length if limit is None else min(limit, self.max_length)
        layers: int = config.num_hidden_layers
        self.count = layers + 1
        self.choice = LayerChoice(
            options.layers, self.count, options.mix_scores, options.normalize, apart=options.learn_mix
        )
        self.images: dict[str, tuple[Dataset, int]] = {}

    def add(self, rows: Dataset, column: str, split: str) -> list[list[str]]:
        """The rows of a split, of images in `column`."""
        import datasets

        where, found = RowNames(rows, split), []
        stored = rows.cast_column(column, datasets.Image(decode=False))[column]
        pictures = rows.select_columns([column]).cast_column(column, datasets.Image())
        for row, image in enumerate(stored):
            check_image(image, where, row)
            key = hashlib.sha256(content_of(image)).hexdigest()
            self.images[key] = (pictures, row)
            found.append([key])
        return found

    def batch(self, texts: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        pictures = []
        for (key,) in texts:
            rows, row = self.images[key]
            pictures.append(next(iter(rows[row].values())))
        if self.by_patches:
            config: Any = self.config
            mode = "L" if config.num_channels == 1 else "RGB"
            pixels = self.processor(images=[as_mode(picture, mode) for picture in pictures], return_tensors="pt")
            return {"pixel_values": pixels["pixel_values"].to(self.model.device)}
        made = self.processor(images=[as_mode(picture, "RGB") for picture in pictures])["input_ids"]
        ids = torch.stack([torch.as_tensor(row) for row in made]).long()
        if self.plane is not None:  # read without a start, in the plane's order
            return {"input_ids": self.plane.ordered(ids).to(self.model.device)}
        start = torch.full((len(ids), 1), self.config.vocab_size - 1)
        return {"input_ids": torch.cat([start, ids], dim=1)[:, : self.max_length].to(self.model.device)}

    def states(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        with torch.no_grad():
            out = self.model(**batch, output_hidden_states=True)
        found = [*(state.float() for state in out.hidden_states[:-1]), out.last_hidden_state.float()]
        if len(found) != self.count or any(state.shape[:2] != found[-1].shape[:2] for state in found):
            raise ValueError(
                f"a model of type {self.config.model_type!r} does not have a state of every token after every layer;"
                " take a model of another type"
            )
        return found, torch.ones(found[-1].shape[:2], dtype=torch.bool, device=found[-1].device)


def read_images(
    options: FeatureOptions, source: TaskData, config: XFormerConfig
) -> tuple[ImageReader, dict[str, Dataset], dict[str, list[list[str]]]]:
    """(reader, splits, rows by split). Raises ValueError for options about text, and for what is no image."""
    from .tasks.base import check_columns

    for name in ("text_column", "text_pair_column", "tokenizer", "max_length"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is about text, and {options.model!r} reads images; leave it out")
    splits = load_images(source)
    columns = splits["train"].column_names
    wanted = (options.image_column,) if options.image_column is not None else IMAGES
    column = next((name for name in wanted if name in columns), None)
    if column is None:
        raise ValueError(f"the data has no column of images; name one of {columns} with --image_column")
    if options.probe is not None:
        check_columns(splits, [options.probe])
    splits = hold_out(splits, column, source)
    reader = ImageReader(options, config)
    return reader, splits, {name: reader.add(rows, column, name) for name, rows in splits.items()}
