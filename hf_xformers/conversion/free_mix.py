# SPDX-License-Identifier: Apache-2.0
"""Models of the free mix as those of a variant whose components they have."""

from __future__ import annotations

from typing import cast

import torch
from transformers import PreTrainedModel

from ..configuration_xformer import XFormerConfig
from ..variants import config_class, family
from .transfer import carry_generation, our_head_of


def as_variant(config: XFormerConfig, variant: str) -> XFormerConfig:
    """The config of the free mix as one of a variant with its components.

    Raises:
        TypeError, ValueError: the variant has other fields.
    """
    fields = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    named = [family(config.model_type), family(variant)]
    heads = [key for key, made in named[0].items() if made.__name__ in (config.architectures or [])]
    made = config_class(variant)(**fields)
    made.architectures = [named[1][key].__name__ for key in heads if key in named[1]]
    return made


def model_as_variant(model: PreTrainedModel, variant: str) -> PreTrainedModel:
    """A model of the free mix in the class of a variant with its components; the two share their tensors.

    Raises:
        TypeError, ValueError: as [`as_variant`], or the variant has no such head.
    """
    head = our_head_of(model)
    if head not in family(variant):
        raise ValueError(f"{variant} has no head {head!r}; it has: {', '.join(family(variant))}.")
    with torch.device("meta"):
        made = family(variant)[head](as_variant(cast(XFormerConfig, model.config), variant))
    made.load_state_dict(model.state_dict(), assign=True)
    carry_generation(model, made)
    return made.train(model.training)
