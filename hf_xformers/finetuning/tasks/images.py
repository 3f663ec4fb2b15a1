# SPDX-License-Identifier: Apache-2.0
"""Classification of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...data.images import IMAGE_SUFFIXES
from ...data.picture_modes import as_mode
from ...objectives.base import SeededCollator, keyed_generator
from ..names import CLASS_LABELS, IMAGES
from ..origin import RowNames, columns_of
from .base import Encoded, Labels, check_columns, true_answers
from .classification import OneClass

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from ..options import TaskData, TaskOptions

AUGMENTATIONS = ("flip", "crop")


class ImageClassification(OneClass):
    """One of several classes for each image, which is read in patches. Metrics: accuracy, F1 (of class 1 of two; else
    the mean over classes), Matthews."""

    id = "image-classification"
    head = "ImageClassification"
    reads = ("image_column", "label_column", "augment", "colors")
    reads_text = False
    row_files = IMAGE_SUFFIXES
    of_colors: ClassVar[bool] = False  # images are ids of colors

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        if options.colors is not None and not self.of_colors:
            raise ValueError(
                f"--colors {options.colors} is for models whose tokens are colors, such as image_gpt, and this one"
                " reads patches; leave it out"
            )
        for name in options.augment:
            if name not in AUGMENTATIONS:
                raise ValueError(f"--augment {name!r} is unknown; take some of {', '.join(AUGMENTATIONS)}")
        self.shape, self.channels = (0, 0), 3

    def extent(self) -> str:
        return f"of {self.shape[0]} x {self.shape[1]} pixels"

    # ------------------------------------------------------------------------------------------------ data

    def load(self, source: TaskData) -> dict[str, Dataset]:
        from datasets import Image

        from ..image_rows import hold_out, load_images

        splits = load_images(source)
        first = next(iter(splits.values()))
        column = self.column(first, self.options.image_column, IMAGES, "image", "image_column")
        return hold_out({split: rows.cast_column(column, Image()) for split, rows in splits.items()}, column, source)

    def of_files(self, paths: Sequence[str]) -> Dataset:
        from datasets import Dataset, Image

        column = self.options.image_column or IMAGES[0]
        return Dataset.from_dict({column: list(paths)}).cast_column(column, Image())

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        train = splits["train"]
        self.find_columns(train)
        check_columns(splits, [self.image_column, self.label_column], optional_in_test=[self.label_column])
        where = RowNames(train, "train")
        feature = train.features[self.label_column]
        self.labels = Labels.of(train[self.label_column], feature, config, "label_column", where)

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        self.image_column = self.column(rows, self.options.image_column, IMAGES, "image", "image_column")
        wanted = self.options.label_column
        if answers and wanted is None and not set(CLASS_LABELS) & set(columns_of(rows)):
            raise ValueError(
                f"the images have no classes (the columns are {columns_of(rows)}): put those of each class in a folder"
                " that is called as the class, or name the column of the classes with --label_column"
            )
        self.label_column = self.column(rows, wanted, CLASS_LABELS, "label", "label_column", answers)

    def columns(self) -> dict[str, Any]:
        return {"image_column": self.image_column, "label_column": self.label_column}

    def read_config(self, config: PreTrainedConfig) -> None:
        size = config.image_size
        self.shape = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        self.channels = config.num_channels
        if self.channels not in (1, 3):
            raise ValueError(
                f"images have 1 channel (gray) or 3 (red, green, blue), and the model reads `num_channels`"
                f" {self.channels}; set --num_channels to 1 or 3"
            )

    def processor(self, config: PreTrainedConfig, saved: str | None) -> Any:
        """The saved model's image processor, or one that resizes images to its size and numbers to [-1, 1]."""
        import transformers

        from ...data.images import need_pillow
        from ...data.patch_processors import patch_processor

        need_pillow()
        self.read_config(config)
        if saved is not None:
            try:
                return transformers.AutoImageProcessor.from_pretrained(saved)
            except (OSError, ValueError):
                pass  # it was saved without one
        return patch_processor(self.shape, self.channels)

    def encode(self, rows: Dataset, tokenizer: Any, split: str) -> Encoded:
        from datasets import Image

        from ..image_rows import check_image

        where = RowNames(rows, split)
        stored = rows.cast_column(self.image_column, Image(decode=False))[self.image_column]
        self.check_sizes([check_image(image, where, row) for row, image in enumerate(stored)], where)
        given = true_answers(rows, self.label_column, split)
        labelled = bool(given)
        kept: list[dict[str, Any]] = [{"image": (image["path"] or str(row))} for row, image in enumerate(stored)]
        images, columns = rows, [self.image_column]
        if labelled:
            feature = rows.features[self.label_column]
            ids = [self.labels.id(value, feature, where, row, "label_column") for row, value in enumerate(given)]
            images = images.remove_columns([name for name in images.column_names if name == "labels"])
            images, columns = images.add_column("labels", ids), [*columns, "labels"]
            kept = [{**row, "label": label} for row, label in zip(kept, ids)]
        images = images.select_columns(columns)
        if self.image_column != "image":
            images = images.rename_column(self.image_column, "image")
        return Encoded(self.inputs(images, tokenizer), kept, labelled)

    def check_sizes(self, sizes: Sequence[tuple[int, int]], where: RowNames) -> None:
        """Raises ValueError for images that have to be of the model's size; patches are of images that are resized."""

    def inputs(self, images: Dataset, processor: Any) -> Dataset:
        """Columns `image` and `labels` as what the model reads."""
        return images.with_transform(ReadImages(processor, self.channels))

    def collator(self, tokenizer: Any, model: Any, seed: int) -> Any:
        return ImageCollator(tokenizer, self.options.augment, seed)


class ReadImages:
    """Columns `image` (pictures of any size) as `pixel_values` [C, H, W], bytes of the size that the model reads."""

    def __init__(self, processor: Any, channels: int) -> None:
        self.processor, self.mode = processor, "L" if channels == 1 else "RGB"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: values for name, values in batch.items() if name != "image"}
        if "image" in batch:
            pictures = [as_mode(picture, self.mode) for picture in batch["image"]]
            resized = self.processor(images=pictures, do_rescale=False, do_normalize=False, return_tensors="pt")
            found["pixel_values"] = list(resized["pixel_values"])
        return found


class ImageCollator(SeededCollator):
    """Batches of `pixel_values` [B, C, H, W], scaled as the image processor does.

    augmentations, in training only: `crop` moves an image by up to an eighth of its sides, with black at the edge;
    `flip` mirrors half of them. What happens to an image depends on the seed, the epoch and the image alone.
    """

    black = 0

    def __init__(self, processor: Any, augmentations: Sequence[str] = (), seed: int = 0, static: bool = False) -> None:
        super().__init__(seed, static)
        self.processor, self.augmentations = processor, tuple(augmentations)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        images = [self.image_of(feature) for feature in features]
        if self.augmentations and not self.static:
            images = [self.augmented(image) for image in images]
        labels = [feature["labels"] for feature in features if "labels" in feature]
        return {**self.batch_of(images), **({"labels": torch.tensor(labels)} if labels else {})}

    def image_of(self, feature: Mapping[str, Any]) -> Tensor:
        """[C, H, W]"""
        return feature["pixel_values"]

    def batch_of(self, images: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": self.processor(images=images, do_resize=False, return_tensors="pt")["pixel_values"]}

    def augmented(self, image: Tensor) -> Tensor:
        """[C, H, W] -> [C, H, W]"""
        generator = keyed_generator(self.seed, self.epoch, image.flatten())

        def drawn(most: int) -> int:
            return int(torch.randint(0, most + 1, (), generator=generator))

        if "crop" in self.augmentations:
            height, width = image.shape[1:]
            tall, wide = height // 8, width // 8
            padded = torch.nn.functional.pad(image, (wide, wide, tall, tall), value=self.black)
            top, left = drawn(2 * tall), drawn(2 * wide)
            image = padded[:, top : top + height, left : left + width]
        if "flip" in self.augmentations and drawn(1):
            image = image.flip(-1)
        return image
