# SPDX-License-Identifier: Apache-2.0
"""The image processor of models with one channel. Imported, it is known to `AutoImageProcessor` by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image

from ..compat import AutoImageProcessor, ViTImageProcessorPil
from .picture_modes import as_mode


class GreyImageProcessor(ViTImageProcessorPil):
    """transformers' image processor for Vision Transformers, which makes pictures gray first: pipelines give every
    picture in three colors, and one mean fits one channel."""

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        if isinstance(image, PIL.Image.Image):
            image = as_mode(image, "L")
        return super().process_image(image, *args, **kwargs)


# The first argument is a config class whose models have this processor where they were saved with none, and no class
# is to: those of three channels would get it, too.
AutoImageProcessor.register(GreyImageProcessor, image_processor_classes={"pil": GreyImageProcessor})
