# SPDX-License-Identifier: Apache-2.0
"""Classification of images by models whose tokens are colors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...configuration_xformer import XFormerConfig
from ...data.picture_modes import as_mode
from ..origin import RowNames
from .images import ImageClassification, ImageCollator

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from ..options import TaskOptions


class ColorClassification(ImageClassification):
    """An image is read as the ids of its pixels' nearest clusters, row by row, without a start; a linear map of the
    last layer's mean says its class (Chen et al. 2020, section 2.3). The image processor that turns images into ids is
    that of the saved model; a model with fresh weights gets clusters of the training images."""

    head = "SequenceClassification"
    of_colors = True

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        if options.colors is not None and options.colors < 2:
            raise ValueError(f"--colors {options.colors} must be at least 2")
        self.made: Any = None
        self.pools = True

    @classmethod
    def serves(cls, config_class: type[PreTrainedConfig]) -> bool:
        return issubclass(config_class, XFormerConfig) and config_class.reads_colors != "no"

    # ------------------------------------------------------------------------------------------------ data

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        super().settle(splits, config)
        self.pools = config is None  # a head that is trained reads what it has learnt to read

    def open_processor(self, splits: Mapping[str, Dataset], saved: str | None, seed: int) -> None:
        from ...data.images import need_pillow, one_size, sizes_of
        from ...training.image_pretraining import processor_of_colors

        need_pillow()
        if saved is not None:
            if self.options.colors is not None:
                raise ValueError(
                    f"--colors {self.options.colors} makes clusters, and {saved!r} has those that it has learnt;"
                    " leave it out"
                )
            self.made = _saved_processor(saved)
            return
        train = self._images(splits["train"])
        try:
            size = one_size(sizes_of(train), ["the training rows"])
        except ValueError as error:
            raise ValueError(f"{str(error).partition('; give one to all')[0]}; resize them to one") from error
        self.made = processor_of_colors(train, size, self.options.colors, seed)

    def decided_fields(
        self, config_class: type[XFormerConfig], components: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from ...training.image_pretraining import decided_by_colors, refuse_decided, size_of

        refuse_decided(fields)
        decided = decided_by_colors(config_class, components, len(self.made.clusters), size_of(self.made))
        return {**components, **decided.components}, {**decided.fields, **fields}

    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), **({"classifier_pooling": "mean"} if self.pools else {})}

    def processor(self, config: PreTrainedConfig, saved: str | None) -> Any:
        if self.made is None:
            self.made = _saved_processor(str(saved))
        return self.made

    def read_config(self, config: PreTrainedConfig) -> None:
        from ...training.building import longest_input
        from ...training.image_pretraining import plane_of, size_of

        known: Any = config
        self.shape = size_of(self.made)
        pixels, limit = self.shape[0] * self.shape[1], longest_input(known)
        if known.vocab_size < len(self.made.clusters):
            raise ValueError(
                f"the image processor has {len(self.made.clusters)} colors, and the model {known.vocab_size} tokens;"
                " take the processor that the model was trained with"
            )
        if limit is not None and limit < pixels:
            raise ValueError(
                f"images of {self.shape[0]} x {self.shape[1]} pixels are {pixels} tokens, and the model has positions"
                f" for {limit}; take smaller images, or a model with a larger max_position_embeddings"
            )
        grid = plane_of(known, self.shape)
        if grid is not None and grid.block is not None:
            raise ValueError(
                f"attention {known.attention.type!r} goes through an image block by block, and image processors write"
                " it row by row; take --attention.local 1d"
            )

    def check_sizes(self, sizes: Sequence[tuple[int, int]], where: RowNames) -> None:
        for row, size in enumerate(sizes):
            if size != self.shape:
                raise ValueError(
                    f"{where[row]} has {size[0]} x {size[1]} pixels, and the model reads images of {self.shape[0]} x"
                    f" {self.shape[1]}; resize it"
                )

    def _images(self, rows: Dataset) -> Dataset:
        """The images alone, in a column `image`."""
        images = rows.select_columns([self.image_column])
        return images if self.image_column == "image" else images.rename_column(self.image_column, "image")

    def inputs(self, images: Dataset, processor: Any) -> Dataset:
        return images.map(ReadColors(processor), batched=True, batch_size=64, remove_columns=["image"])

    def collator(self, tokenizer: Any, model: Any, seed: int) -> ColorCollator:
        return ColorCollator(tokenizer, self.options.augment, seed)


def _saved_processor(name: str) -> Any:
    """The image processor of a model whose tokens are colors."""
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} has no image processor (preprocessor_config.json) with the clusters that its tokens are; take"
            " the folder that pretraining wrote"
        ) from error
    if getattr(found, "clusters", None) is None:
        raise ValueError(
            f"the image processor of {name!r} has no clusters of colors; take the folder that pretraining wrote"
        )
    return found


class ReadColors:
    """Columns `image` as `input_ids` [H W], by an image processor with clusters."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        pictures = [as_mode(picture, "RGB") for picture in batch["image"]]
        return {"input_ids": [np.asarray(ids).tolist() for ids in self.processor(images=pictures)["input_ids"]]}


class ColorCollator(ImageCollator):
    """Batches of `input_ids` [B, H W], changed in training as [`ImageCollator`] changes pixels."""

    def __init__(self, processor: Any, augmentations: Sequence[str] = (), seed: int = 0, static: bool = False) -> None:
        super().__init__(processor, augmentations, seed, static)
        self.black = int(np.square(np.asarray(processor.clusters) + 1.0).sum(-1).argmin())

    def image_of(self, feature: Mapping[str, Any]) -> Tensor:
        """[1, H, W]"""
        size = self.processor.size
        return torch.as_tensor(feature["input_ids"]).view(1, int(size["height"]), int(size["width"]))

    def batch_of(self, images: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"input_ids": torch.stack(list(images)).flatten(1)}
