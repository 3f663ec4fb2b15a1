# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers' own families in this package's layout, and back.

One file per family (`families/bert.py`, ...) holds the whole correspondence as data, which both directions read:
config fields and a table of weight rules (`rules.py`). `transfer.py` applies it to a loaded model, `checkpoint.py` to
folders and Hub ids.

```python
>>> from hf_xformers.conversion import convert_checkpoint, from_transformers, to_transformers

>>> model = from_transformers("path/to/bert")  # an XFBertForMaskedLM, if that is what the folder holds
>>> original = to_transformers(model)
>>> print(convert_checkpoint("path/to/bert", "path/to/xf_bert").summary())
```

`swap.py` puts other components into a trained model; `derivations.py` says what their tensors are made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_xformer import XFormerConfig
from ..modeling_base import XFormerPreTrainedModel
from .activations import activation, feedforward
from .base import Converter, converters, decoder_heads, register
from .checkpoint import convert_checkpoint, load, read_model_type
from .free_mix import model_as_variant
from .lookup import converter_back, converter_for
from .report import Report
from .rotary import rope_parameters, rotary_of, rotation_fields
from .rules import copied
from .swap import swap_checkpoint, swap_components
from .swap_report import SwapReport
from .transfer import MADE_OF, Source, to_ours, to_theirs

logger = logging.get_logger(__name__)


def _told(converted: tuple[PreTrainedModel, Report]) -> PreTrainedModel:
    model, report = converted
    if not report.complete or report.notes:
        logger.warning(report.summary())
    return model


def from_transformers(model_or_path: PreTrainedModel | str | Path, head: str | None = None) -> PreTrainedModel:
    """Our model with the weights of one of transformers' own, of any family in [`converters`].

    model_or_path: a loaded model (which stays as it is and shares no memory with the result), a folder, or a Hub id.
    head: our head's name (`Model`, `ForMaskedLM`, `ForSequenceClassification`, ...); by default the one that fits. The
    result is in evaluation mode, on the model's device and in its dtype. What is new or left out is logged.

    Raises:
        TypeError: neither a model nor a path.
        ValueError: the model, its config or one of its tensors has no counterpart, or the checkpoint cannot be read.
    """
    if isinstance(model_or_path, PreTrainedModel):
        if isinstance(model_or_path, XFormerPreTrainedModel):
            raise TypeError(f"{type(model_or_path).__name__} is a model of this package already.")
        converter = converter_for(model_or_path.config.model_type)
        return _told(to_ours(Source(model_or_path, borrowed=True), converter, head))
    converter, ours = _read(model_or_path)
    if ours:
        raise ValueError(f"{str(model_or_path)!r} holds a model of this package already; use `from_pretrained`.")
    return _told(to_ours(load(model_or_path, converter, False, head), converter, head))


def to_transformers(
    model_or_path: PreTrainedModel | str | Path, head: str | None = None, model_type: str | None = None
) -> PreTrainedModel:
    """The counterpart of [`from_transformers`]: transformers' own model with the weights of one of ours.

    model_type: transformers' family to make, where several have what the model is (`"mistral"`); by default the one
    that it came from, where the folder or the converted model says so, or the one that the variant is named
    after. Where transformers has no class for the head, the bare model is made.

    Raises:
        TypeError: neither one of this package's models nor a path.
        ValueError: the model is no preset that transformers has (e.g. another attention), or cannot be read.
    """
    if isinstance(model_or_path, PreTrainedModel):
        if not isinstance(model_or_path, XFormerPreTrainedModel):
            raise TypeError(f"{type(model_or_path).__name__} is no model of this package.")
        made_of = getattr(model_or_path, MADE_OF, None)
        wanted = converters().get(str(model_type))
        if wanted is not None and wanted.variant != model_or_path.config.model_type == XFormerConfig.model_type:
            model_or_path = model_as_variant(model_or_path, wanted.variant)
        converter = converter_back(cast(XFormerConfig, model_or_path.config), model_type, made_of)
        return _told(to_theirs(Source(model_or_path, borrowed=True), converter, head))
    converter, ours = _read(model_or_path, model_type)
    if not ours:
        raise ValueError(f"{str(model_or_path)!r} holds a model of transformers already; use `from_pretrained`.")
    return _told(to_theirs(load(model_or_path, converter, True, head), converter, head))


def _read(path: object, model_type: str | None = None):
    if not isinstance(path, (str, Path)):
        raise TypeError(f"Give a model, a folder or a Hub id, got {type(path).__name__}: {path!r}.")
    return read_model_type(path, model_type)


__all__ = [
    "Converter",
    "Report",
    "SwapReport",
    "activation",
    "convert_checkpoint",
    "converter_for",
    "converters",
    "copied",
    "decoder_heads",
    "feedforward",
    "from_transformers",
    "register",
    "rope_parameters",
    "rotary_of",
    "rotation_fields",
    "swap_checkpoint",
    "swap_components",
    "to_transformers",
]
