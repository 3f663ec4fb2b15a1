# SPDX-License-Identifier: Apache-2.0
"""Models of another geometry: fewer heads or layers, with the tensors that are left.

A smaller model is built from its config, and takes every tensor from the larger one: as it is where shapes agree, and
without the rows and columns of what was removed where they do not. Nothing starts anew; a tensor that cannot be cut is
a reason to refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_xformer import XFormerConfig
from ..conversion.quiet import quiet
from ..conversion.transfer import carry_generation
from ..core.tasks import any_task
from ..modeling.classifiers import XFormerForMultipleChoice
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_tower import XFormerTower

_PROBE_ROWS, _PROBE_LENGTH = 2, 24
_TOLERANCE = 1e-3  # of the largest output: float32, and mechanisms that divide by small sums


def towers_of(model: PreTrainedModel) -> dict[str, XFormerTower]:
    """The towers of one of this package's models, by the names that their tensors begin with, the trunk first.

    Raises `ValueError` for a model of transformers' own."""
    if not isinstance(model, XFormerPreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is a class of transformers; convert the model first (`hf-xformers convert`)"
        )
    return {name: module for name, module in model.named_modules() if isinstance(module, XFormerTower)}


def config_with(config: XFormerConfig, changes: Mapping[str, Any]) -> XFormerConfig:
    """A saved config with other fields. Raises ValueError and TypeError as the config does."""
    values = {**config.to_dict(), **changes}
    for key in ("model_type", "transformers_version"):
        values.pop(key, None)
    made = type(config)(**values)
    made._attn_implementation = config._attn_implementation
    return made


def tower_fields(config: XFormerConfig, is_decoder_tower: bool, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to one tower's fields as changes to the whole config: those of an encoder-decoder's decoder stand in
    `decoder`."""
    if not is_decoder_tower:
        return dict(changes)
    return {"decoder": {**(config.to_dict().get("decoder") or {}), **changes}}


def own_layers(config: XFormerConfig, is_decoder_tower: bool) -> dict[int, dict[str, Any]]:
    """What single layers of a tower have of their own, by number, in plain values."""
    fields = config.to_dict()
    if is_decoder_tower:
        fields = fields.get("decoder") or {}
    return {int(number): dict(entry) for number, entry in (fields.get("per_layer_config") or {}).items()}


def built(model: PreTrainedModel, config: XFormerConfig) -> PreTrainedModel:
    """The model's class at another config, without numbers. Raises `ValueError` where it cannot be."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(config))


def remade(
    model: PreTrainedModel, config: XFormerConfig, take: Callable[[str, torch.Size], Tensor | None]
) -> PreTrainedModel:
    """The model at another config, in evaluation mode. take(name, shape): the tensor of the new model, None where
    there is none.

    Raises:
        ValueError: a tensor would start anew.
    """
    wanted, state = built(model, config).state_dict(), model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, place in wanted.items():
        made = take(name, place.shape)
        if made is None or made.shape != place.shape:
            cut = name in state and state[name].shape != place.shape
            found = f"{list(state[name].shape)} cannot be cut to that" if cut else "there is nothing for it"
            raise ValueError(
                f"{name} of the smaller model has the shape {list(place.shape)}, and in the larger one {found}:"
                f" {type(model).__name__} as it is set cannot lose these parts; take another --method"
            )
        tensors[name] = made.detach().clone()
    cls: Any = type(model)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, info = cls.from_pretrained(
            None, config=config, state_dict=tensors, dtype=model.dtype, output_loading_info=True
        )
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))[0]
        raise ValueError(f"{wrong} of the smaller model would start anew; take another --method")
    carry_generation(model, target)
    return target.to(model.device).eval()


# ------------------------------------------------------------------------------------------------ the proof


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Inputs on which two models can be compared: random tokens with padding on the right, or random images."""
    from ..training.building import longest_input

    config = cast(Any, model.config)
    generator = torch.Generator().manual_seed(1)
    if getattr(config, "modality", "text") == "image":
        size = (_PROBE_ROWS, config.num_channels, *config.image_shape)
        return {"pixel_values": torch.randn(size, generator=generator).to(model.device, model.dtype)}
    if getattr(config, "modality", "text") == "sound":
        features = torch.randn((_PROBE_ROWS, _PROBE_LENGTH, config.num_mel_bins), generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
    length = min(_PROBE_LENGTH, longest_input(config) or _PROBE_LENGTH)
    ids = torch.randint(config.vocab_size, (_PROBE_ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 4 :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder:
        rows = config.tower("decoder").vocab_size
        found["decoder_input_ids"] = torch.randint(rows, (_PROBE_ROWS, length), generator=generator)
    if isinstance(model, XFormerForMultipleChoice):  # one choice in each row
        found = {name: value[:, None] for name, value in found.items()}
    found |= any_task(config, _PROBE_ROWS)
    return {name: value.to(model.device) for name, value in found.items()}


@torch.no_grad()
def first_output(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """What a model's class gives first (logits, states), with the random numbers of one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(**inputs)[0]


def distance(first: PreTrainedModel, second: PreTrainedModel) -> float:
    """The largest difference of two models' outputs on the probe, by the largest output of the first, over real
    tokens."""
    inputs = probe(first)
    one, other = first_output(first, inputs), first_output(second, inputs)
    if one.shape != other.shape:
        return float("inf")
    difference = (one - other).abs()
    mask = inputs.get("attention_mask")
    if mask is not None and "decoder_input_ids" not in inputs and difference.shape[:2] == mask.shape:
        difference = difference[mask.bool()]
    return float(difference.max() / one.abs().max().clamp(min=1e-6))


def agree(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    """Whether two models compute the same, up to rounding."""
    return distance(first, second) <= _TOLERANCE
