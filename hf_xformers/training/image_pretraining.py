# SPDX-License-Identifier: Apache-2.0
"""Pretraining on images: by patches, of which some are hidden, or by colors of pixels, which are tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..core.changes import components_of
from ..core.components import build_spec
from ..data.colors import color_clusters, color_processor, nearest_colors, pixels_of
from ..data.images import has_images, load_image_dataset, one_size, sizes_of
from ..data.patch_processors import patch_processor
from ..data.picture_modes import as_mode
from .building import default_objective, longest_input, with_changes
from .image_pictures import continuations, reconstructions, write_pictures
from .image_trainer import MaskedImageTrainer
from .preparation import Further, ModelChoice, Prepared, Request
from .run_folder import check_same_model
from .text import TextData
from .trainer import XFormerTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

    from ..configuration_xformer import XFormerConfig
    from ..ops.common.token_grid import TokenGrid

USUAL_COLORS = 512  # clusters (Chen et al. 2020, section 3)
CLUSTERED_PIXELS = 200_000  # of the training images, drawn, from which clusters are made
MEASURED_IMAGES = 4096  # from which the median picture is
SHOWN_IMAGES = 8


@dataclass
class ImageData:
    """How images are read; where they come from is `--data`."""

    _argument_group_name = "images"

    image_column: str | None = field(default=None, metadata={"help": "Column of the images. Default: the only one."})
    resize: list[int] | None = field(
        default=None,
        metadata={"nargs": "+", "help": "Height and width to give to all images, in pixels."},
    )
    colors: int | None = field(
        default=None,
        metadata={"aliases": ["--colours"], "help": "Clusters of colors that are tokens. Default: 512 at most."},
    )

    def size(self) -> tuple[int, int] | None:
        """Height and width to give to images. Raises ValueError for what is no size."""
        if self.resize is None:
            return None
        if len(self.resize) not in (1, 2) or min(self.resize) < 1:
            raise ValueError(
                f"--resize {' '.join(map(str, self.resize))} is no size; give a height and a width in pixels, or one"
                " number for squares"
            )
        return self.resize[0], self.resize[-1]

    def check(self) -> None:
        self.size()
        if self.colors is not None and self.colors < 2:
            raise ValueError(f"--colors {self.colors} must be at least 2")

    def chosen(self) -> list[str]:
        """The options that were given."""
        return [entry.name for entry in dataclasses.fields(self) if getattr(self, entry.name) != entry.default]


def reads_images(config_class: type[XFormerConfig], names: Sequence[str], images: ImageData) -> bool:
    """Whether a variant is trained on images with this data: some read text as well."""
    if config_class.modality == "image" or config_class.reads_colors == "only":
        return True
    return config_class.reads_colors == "also" and (bool(images.chosen()) or any(map(has_images, names)))


def refuse_image_options(images: ImageData) -> None:
    """For runs on text."""
    if images.chosen():
        raise ValueError(
            f"--{images.chosen()[0]} is about images, and this variant reads text; leave it out, or take --variant"
            " vision_transformer, image_gpt or image_transformer"
        )


def usual_objective(config_class: type[XFormerConfig]) -> str:
    return "clm" if config_class.reads_colors != "no" else default_objective(config_class)


# ------------------------------------------------------------------------------------------------ rows


@dataclass
class ReadPixels:
    """Columns `image` as `pixel_values` [C, H, W], bytes of the size that the processor says."""

    processor: Any
    channels: int

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        pictures = [as_mode(picture, "L" if self.channels == 1 else "RGB") for picture in batch["image"]]
        made = self.processor(images=pictures, do_rescale=False, do_normalize=False, return_tensors="pt")
        return {"pixel_values": list(made["pixel_values"])}


@dataclass
class ReadColors:
    """Columns `image` as `input_ids`: the start, where there is one, and the nearest cluster of each pixel, in the
    order in which the model goes through the plane."""

    clusters: list[list[float]]
    size: tuple[int, int]
    start: int | None
    grid: TokenGrid | None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        pixels = pixels_of(batch["image"], self.size)
        ids = nearest_colors(pixels.reshape(-1, 3), torch.tensor(self.clusters)).view(len(pixels), -1)
        ids = ids if self.grid is None else self.grid.ordered(ids)
        if self.start is not None:
            ids = torch.cat([torch.full((len(ids), 1), self.start), ids], dim=1)
        return {"input_ids": ids.tolist()}


@dataclass
class Beginnings:
    """The first `length` tokens of rows."""

    length: int

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": [ids[: self.length] for ids in batch["input_ids"]]}


class NoSpecialTokens:
    """What a collator asks of a tokenizer: rows of colors are of one length and hold nothing else."""

    pad_token_id = None
    eos_token_id = None
    padding_side = "right"


def drawn_pixels(rows: Dataset, size: tuple[int, int], seed: int) -> Tensor:
    """Pixels [N, 3] in [-1, 1] of images drawn from `rows`, `CLUSTERED_PIXELS` at most."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, CLUSTERED_PIXELS // (size[0] * size[1]))
    chosen = torch.randperm(len(rows), generator=generator)[:count].sort().values.tolist()
    parts = [pixels_of([rows[row]["image"]], size).reshape(-1, 3) for row in chosen]
    return torch.cat(parts)


def processor_of_colors(rows: Dataset, size: tuple[int, int], colors: int | None, seed: int) -> Any:
    """An image processor with clusters of the colors of training images. colors: how many; None: the usual number,
    or as many as there are."""
    pixels = drawn_pixels(rows, size, seed)
    count = colors or min(USUAL_COLORS, len(pixels.unique(dim=0)))
    return color_processor(color_clusters(pixels, count, seed=seed), size)


def size_of(processor: Any) -> tuple[int, int]:
    """Height and width that an image processor gives to images."""
    return int(processor.size["height"]), int(processor.size["width"])


class DecidedByColors(NamedTuple):
    """Of a model with fresh weights: components, whole, and fields that stand beneath those given."""

    components: dict[str, Any]
    fields: dict[str, Any]


def refuse_decided(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for given fields that follow from colors."""
    for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"):
        if name in fields:
            raise ValueError(f"--{name} follows from the colors of the images; give --colors in its place")


@runtime_checkable
class ReadsPlanes(Protocol):
    """An attention that can read a text as a plane of tokens."""

    def fields_of_plane(self, rows: int, columns: int) -> dict[str, Any]:
        """The fields that make it read one of so many tokens."""


def decided_by_colors(
    config_class: type[XFormerConfig], components: Mapping[str, Any], colors: int, size: tuple[int, int]
) -> DecidedByColors:
    """What follows for a fresh model from the number of clusters and the images' size: ids, positions, and the plane
    that its attention reads a text as. Without one a text begins with a start, and has a position more than pixels."""
    made = {**components_of(config_class), **with_changes(config_class, components, {})}
    attention: Any = build_spec("attention", made["attention"])
    given = components.get("attention", {})
    plane = attention.fields_of_plane(*size) if isinstance(attention, ReadsPlanes) else {}
    pixels = size[0] * size[1]
    return DecidedByColors(
        {"attention": {**({"type": given} if isinstance(given, str) else given), **plane}} if plane else {},
        {
            "vocab_size": colors + 1,
            "bos_token_id": colors,
            "pad_token_id": None,
            "max_position_embeddings": pixels if plane else pixels + 1,
        },
    )


def plane_of(config: XFormerConfig, size: tuple[int, int]) -> TokenGrid | None:
    """The plane that a model's attention reads a text as; None: it reads none. Raises ValueError where images of this
    size are another."""
    grids = [layer.attention.token_grid(layer) for layer in config.layer_configs()]
    grid = next((found for found in grids if found is not None), None)
    if grid is not None and (grid.rows, grid.columns) != size:
        raise ValueError(
            f"the images have {size[0]} x {size[1]} pixels, and attention {config.attention.type!r} reads a plane"
            f" of {grid.rows} x {grid.columns}; give --resize, or set its fields"
        )
    return grid


def median_picture(rows: Any, collator: Any) -> Tensor:
    """[C, H, W]: of each pixel the median over the first `MEASURED_IMAGES` training images, scaled as the model reads
    them. No other picture that does not depend on the image is less far off in absolute terms."""
    read = [rows[row]["pixel_values"] for row in range(min(len(rows), MEASURED_IMAGES))]
    pixels = torch.stack(read).flatten(1)
    medians = torch.cat([part.median(0).values for part in pixels.split(4096, dim=1)])  # which copies what it sorts
    return collator([{"pixel_values": medians.view_as(read[0])}])["pixel_values"][0]


# ------------------------------------------------------------------------------------------------ a run


@dataclass
class PreparedImages(Prepared):
    """size: of the images, height and width. `tokenizer` is the image processor. clusters: the colors of tokens; None
    where patches are read."""

    size: tuple[int, int] = (0, 0)
    clusters: Any = None
    grid: TokenGrid | None = None

    def collator(self, seed: int) -> Any:
        if self.clusters is not None:
            return self.objective.collator(NoSpecialTokens(), seed=seed)
        config: Any = self.config
        return self.objective.collator(self.tokenizer, seed=seed, patch=config.patch_shape)  # type: ignore[call-arg]

    def make_trainer(self) -> Callable[..., Any]:
        """What makes the run's trainer."""
        if self.clusters is not None:
            return XFormerTrainer
        config: Any = self.config
        picture = median_picture(self.train, self.collator(0))
        return functools.partial(MaskedImageTrainer, median_picture=picture, patch=config.patch_shape)

    def write_pictures(self, seed: int, folder: Path) -> Path:
        """Draws held-out images (training ones, where none are held out) next to what the saved model makes of
        them."""
        from ..variants import family

        rows = self.train if self.validation is None else self.validation
        count = min(len(rows), SHOWN_IMAGES)
        chosen = [row * len(rows) // count for row in range(count)]  # classes often stand one after another
        cls: Any = family(self.config.model_type)[f"For{self.objective.head}"]
        model = cls.from_pretrained(folder).eval()
        if self.clusters is None:
            batch = self.collator(seed).as_static()([rows[row] for row in chosen])
            return write_pictures(folder, reconstructions(model, batch))
        ids = torch.tensor(rows.with_format(None)[chosen]["input_ids"])  # whole, whatever is read of them
        return write_pictures(folder, continuations(model, ids, self.clusters, self.size, self.grid, seed))


class ImagePreparation(Request):
    """Checks a request about images and prepares them. The options are those of [`Request`]; `source` says where
    images come from, `images` how they are read.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: ModelChoice,
        source: TextData,
        images: ImageData,
        args: TrainingArguments,
        **further: Unpack[Further],
    ) -> None:
        super().__init__(choice, args, usual=usual_objective, **further)
        images.check()
        self.source, self.images = source, images
        self.by_patches = self.config_class.modality == "image"
        self._refuse_text_options()
        if not source.data:
            raise ValueError(
                f"variant {self.config_class.model_type!r} reads images, and there are none; give a folder of them"
                " with --data"
            )

    def _refuse_text_options(self) -> None:
        wanted = "masked_image" if self.by_patches else "clm"
        if self.objective.type != wanted:
            raise ValueError(
                f"objective {self.objective.type!r} does not train on images; leave --objective out, which is"
                f" {wanted!r} for variant {self.config_class.model_type!r}"
            )
        plain = {**dataclasses.asdict(TextData()), **dataclasses.asdict(ModelChoice())}
        given = {**dataclasses.asdict(self.source), **dataclasses.asdict(self.choice)}
        about_text = ("text_column", "sample_by", "encoding", "streaming", "block_size", "tokenizer", "tokenizer_type")
        for name in (*about_text, "segment_streams"):
            if given[name] != plain[name]:
                raise ValueError(f"--{name} is about text, and this run reads images; leave it out")
        if self.by_patches and self.images.colors is not None:
            raise ValueError(
                f"--colors is for models whose tokens are colors, and {self.config_class.model_type!r} reads"
                " patches; leave it out"
            )
        if not self.by_patches:
            refuse_decided(self.fields)

    def run(self) -> PreparedImages:
        """Reads the images, makes or loads what turns them into inputs. Processes take turns, the main one first."""
        with self.this_run.turns("preparing the images"), self.this_run.preparing() as self._place:
            splits = load_image_dataset(
                self.source.data,
                split=self.source.data_split,
                column=self.images.image_column,
                config_name=self.source.data_config,
                validation_fraction=self.source.validation_fraction,
            )
            found = [size for rows in splits.values() for size in sizes_of(rows)]
            size = self.images.size() or one_size(found, self.source.data)
            prepared = self._patches(splits, size) if self.by_patches else self._colors(splits, size)
        if self.checkpoint is not None:
            check_same_model(prepared.config, self.checkpoint)
        self.this_run.check_same(prepared.plan)
        return prepared

    def _processor(self, make: Callable[[], Any]) -> Any:
        """The image processor as it is loaded from what the run keeps, so that a resumed run has the very same."""
        from transformers import AutoImageProcessor

        if self.checkpoint is None and self.args.should_save:
            source = self.choice.init_from
            made = make() if source is None else AutoImageProcessor.from_pretrained(source)
            made.save_pretrained(self._place)
        return AutoImageProcessor.from_pretrained(self._place)

    def _patches(self, splits: Mapping[str, Dataset], size: tuple[int, int]) -> PreparedImages:
        if self.choice.init_from is None and "image_size" not in self.fields:
            self.fields["image_size"] = list(size)
        config: Any = self._config(None)
        if config.image_shape != size:
            raise ValueError(
                f"the images have {size[0]} x {size[1]} pixels, and the model reads {config.image_shape[0]} x"
                f" {config.image_shape[1]}; give --resize {config.image_shape[0]} {config.image_shape[1]}, or another"
                " --image_size"
            )
        if config.num_channels not in (1, 3):
            raise ValueError(
                f"images have 1 channel (gray) or 3 (red, green, blue), and the model reads `num_channels`"
                f" {config.num_channels}; set --num_channels to 1 or 3"
            )
        self.objective = self.objective.bound_to(config)
        processor = self._processor(lambda: patch_processor(size, config.num_channels))
        read = ReadPixels(processor, config.num_channels)
        rows = {name: part.with_transform(read) for name, part in splits.items()}
        return self._prepared(config, processor, rows, size, config.grid[0] * config.grid[1])

    def _colors(self, splits: Mapping[str, Dataset], size: tuple[int, int]) -> PreparedImages:
        processor = self._processor(
            lambda: processor_of_colors(splits["train"], size, self.images.colors, self.args.seed)
        )
        clusters = np.asarray(processor.clusters, dtype=np.float32)
        stored = size_of(processor)
        if stored != size:
            raise ValueError(
                f"the images have {size[0]} x {size[1]} pixels, and the model reads {stored[0]} x {stored[1]}; give"
                f" --resize {stored[0]} {stored[1]}"
            )
        if self.images.colors is not None and self.images.colors != len(clusters):
            raise ValueError(f"--colors {self.images.colors}: the model that this starts from has {len(clusters)}")
        config, grid = self._config_of_colors(len(clusters), size)
        start = len(clusters) if grid is None else None
        length = size[0] * size[1] + (start is not None)
        limit = longest_input(config)
        if limit is not None and limit == length - 1 and start is not None:
            length = limit  # as published models are: the last pixel is written and never read
        if limit is not None and limit < length:
            raise ValueError(
                f"images of {size[0]} x {size[1]} pixels are {length} tokens, and the model has positions for {limit};"
                " raise --max_position_embeddings, or take a smaller --resize"
            )
        read = ReadColors(clusters.tolist(), size, start, grid)
        rows = {
            name: part.map(
                read, batched=True, batch_size=16, remove_columns=part.column_names, num_proc=self.source.num_proc
            )
            for name, part in splits.items()
        }
        if length == size[0] * size[1] and start is not None:
            rows = {name: part.with_transform(Beginnings(length)) for name, part in rows.items()}
        prepared = self._prepared(config, processor, rows, size, length)
        prepared.clusters, prepared.grid = clusters, grid
        prepared.plan["vocabulary"] = len(clusters)
        return prepared

    def _config_of_colors(self, colors: int, size: tuple[int, int]) -> tuple[XFormerConfig, TokenGrid | None]:
        """The config, and the plane that its attention reads a text as. Without one a text begins with a start, and
        has a position more than pixels."""
        if self.choice.init_from is None:
            decided = decided_by_colors(self.config_class, self.components, colors, size)
            self.components = {**self.components, **decided.components}
            self.fields = {**decided.fields, **self.fields}
        config = self._config(None)
        if config.head.num_outputs(config) < colors or config.vocab_size < colors + 1:
            raise ValueError(
                f"the model predicts {config.head.num_outputs(config)} of {config.vocab_size} ids, and there are"
                f" {colors} colors and a start; start from the model that these clusters were saved with"
            )
        return config, plane_of(config, size)

    def _prepared(
        self, config: XFormerConfig, processor: Any, rows: Mapping[str, Any], size: tuple[int, int], tokens: int
    ) -> PreparedImages:
        train, validation = rows["train"], rows.get("validation")
        plan = {
            **self.base_plan(config, train, validation),
            "reads": "images",
            "image_size": list(size),
            "data": {**dataclasses.asdict(self.source), **dataclasses.asdict(self.images)},
            "block_size": tokens,
            **dict.fromkeys(("vocabulary", "train_streams", "eval_streams")),
        }
        return PreparedImages(config, self.objective, processor, train, validation, plan, self.checkpoint, size=size)
