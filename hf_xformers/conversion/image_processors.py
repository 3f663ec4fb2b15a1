# SPDX-License-Identifier: Apache-2.0
"""Image processors of converted models: the size, the scale and the colors that a model has learnt to read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoImageProcessor, PreTrainedConfig

from ..configuration_xformer import XFormerConfig
from ..data.images import need_pillow

PROCESSOR_FILE = "preprocessor_config.json"


def reads_images(config: type[XFormerConfig]) -> bool:
    """Whether a variant's models read images: pixels in patches, or the colors of pixels as tokens."""
    return config.modality == "image" or config.reads_colors == "only"


def open_image_processor(source: str | Path) -> Any | None:
    """The image processor of a folder or Hub id; None if it has none. No code of a repository is run.

    Raises:
        ImportError: a folder has one, and Pillow is not installed.
        ValueError: a folder has one that cannot be read.
    """
    name = os.path.expanduser(os.fspath(source))
    folder = Path(name)
    if folder.is_dir():
        if not (folder / PROCESSOR_FILE).is_file():
            return None
        need_pillow()
    try:
        return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of any library that reads the file
        if not folder.is_dir():
            return None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(":.")
        raise ValueError(
            f"The image processor of {name!r} cannot be read ({reason}); copy or download {PROCESSOR_FILE} again, or"
            " remove it to convert the model without it."
        ) from error


def save_image_processor(processor: Any | None, folder: Path, config: PreTrainedConfig, notes: list[str]) -> None:
    """Saves the source's image processor for the converted model, whose config this is. Clusters of colors have one
    form on both sides. What is lost goes to the notes."""
    if processor is None:
        notes.append("the source has no image processor")
        return
    from ..compat import ViTImageProcessorPil
    from ..data.grey_images import GreyImageProcessor

    gray, ours = isinstance(processor, GreyImageProcessor), isinstance(config, XFormerConfig)
    if ours and not gray and getattr(config, "num_channels", 3) == 1 and np.size(processor.image_mean) == 1:
        processor = _as_kind(GreyImageProcessor, processor)
    elif gray and not ours:
        processor = _as_kind(ViTImageProcessorPil, processor)
        notes.append("transformers' image processor does not make pictures gray: give it gray ones")
    processor.save_pretrained(folder)


def _as_kind(kind: Any, processor: Any) -> Any:
    settings = processor.to_dict()
    settings.pop("image_processor_type")
    return kind.from_dict(settings)
