# SPDX-License-Identifier: Apache-2.0
"""Models with fewer layers: the ones that are left, numbered anew.

Fan, Grave and Joulin 2020 (arXiv 1909.11556): a model trained with LayerDrop gives shallow models of its own layers.
Sajjad et al. 2023 (arXiv 2004.03844): the top ones of a pretrained model can go, or every other one, before it is
fine-tuned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..blocks.base import XFormerLayer
from ..configuration_xformer import XFormerConfig
from ..core.evaluating import evaluating
from ..core.sharing import shares_parts
from .geometry import agree, config_with, own_layers, remade, tower_fields, towers_of
from .importance import skipped
from .report import refuse_any_adapter


def choose_layers(count: int, keep: int, which: str) -> list[int]:
    """The layers that stay, of `count`: all but the `top` ones, or `alternate` ones spread evenly, the first among
    them.

    Raises:
        ValueError: `keep` is not between 1 and `count` - 1.
    """
    if not 1 <= keep < count:
        raise ValueError(f"--keep_layers {keep} must be at least 1 and less than the model's {count} layers")
    if which == "top":
        return list(range(keep))
    return [index * count // keep for index in range(keep)]


def layer_number(name: str, tower: str) -> tuple[int, str] | None:
    """(layer, the rest of the name) of a tensor in a layer of the tower; None for any other."""
    prefix = f"{tower}.layers." if tower else "layers."
    if not name.startswith(prefix):
        return None
    number, _, rest = name.removeprefix(prefix).partition(".")
    return (int(number), rest) if re.fullmatch(r"\d+", number) else None


def prune_layers(model: PreTrainedModel, kept: dict[str, list[int]], *, check: bool = True) -> PreTrainedModel:
    """The model with these layers of each tower alone, in their order, and numbered anew; `model` stays as it is and
    shares no memory with it. kept: by tower; a tower that is left out keeps all. check: whether the result is compared
    with the whole model whose other layers pass on what they are given.

    Raises:
        ValueError: no layer left, one that does not exist, layers that are shared over depth, or whose place in the
            model counts, or an adapter.
    """
    refuse_any_adapter(model, type(model).__name__)
    towers = towers_of(model)
    if odd := [name for name in kept if name not in towers]:
        raise ValueError(
            f"{type(model).__name__} has no tower {odd[0]!r}; it has {', '.join(map(repr, towers))}: name one of these"
        )
    config = cast(XFormerConfig, model.config)
    changes: dict[str, Any] = {}
    for name, tower in towers.items():
        layers = kept.get(name)
        if layers is None:
            continue
        count = tower.config.num_hidden_layers
        if shares_parts(tower.config):
            raise ValueError(
                f"the layers of {type(model).__name__} share their {tower.config.share} (`share`), and one that goes"
                " may be the one that owns it; lower `num_hidden_layers` of the model itself instead"
            )
        if len(tower.layers) != count:
            raise ValueError(
                f"stack {tower.config.stack.type!r} runs {len(tower.layers)} layers at {count} depths, and a layer"
                " that goes is missed at every one; lower `num_hidden_layers` of the model itself instead"
            )
        if not layers or len(layers) == count:
            raise ValueError(f"{len(layers)} of {count} layers would stay; keep at least one and not all of them")
        if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= count:
            raise ValueError(f"layers {list(layers)} are not among 0 to {count - 1}, each once and in their order")
        decodes = config.is_encoder_decoder and bool(tower.config.is_decoder)
        own = own_layers(config, decodes)
        left = {new: own[old] for new, old in enumerate(layers) if own.get(old)}
        made: dict[str, Any] = {"per_layer_config": left or None}
        if decodes:
            changes["num_decoder_layers"] = len(layers)
        else:
            made["num_hidden_layers"] = len(layers)
            if config.is_encoder_decoder and config.num_decoder_layers is None and "num_decoder_layers" not in changes:
                changes["num_decoder_layers"] = count
        changes = {**changes, **tower_fields(config, decodes, made)}
    state = model.state_dict()

    def take(name: str, shape: torch.Size) -> Tensor | None:
        for tower, layers in kept.items():
            place = layer_number(name, tower)
            if place is not None:
                prefix = f"{tower}.layers." if tower else "layers."
                return state.get(f"{prefix}{layers[place[0]]}.{place[1]}")
        return state.get(name)

    try:
        smaller = config_with(config, changes)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} cannot lose these layers, since its config would be refused ({error}); take"
            " `--method heads` or `--method weights`"
        ) from error
    pruned = remade(model, smaller, take)
    if check and not _agree_with_skipped(model, pruned, kept):
        raise ValueError(
            f"without some layers {type(model).__name__} does not compute what it does when these pass on what they"
            f" are given: in stack {config.stack.type!r} with block {config.block.type!r} and attention"
            f" {_attention_of(config)} the place of a layer counts; take `--method heads` or `--method weights`"
        )
    return pruned


def _attention_of(config: XFormerConfig) -> str:
    kinds = {layer.attention.type for view in config.tower_configs() for layer in view.layer_configs()}
    return ", ".join(map(repr, sorted(kinds)))


def _agree_with_skipped(model: PreTrainedModel, pruned: PreTrainedModel, kept: dict[str, list[int]]) -> bool:
    towers = towers_of(model)
    gone = [
        cast(XFormerLayer, layer)
        for name, layers in kept.items()
        for index, layer in enumerate(towers[name].layers)
        if index not in layers
    ]
    with evaluating(model), skipped(gone):
        return agree(model, pruned)


def least_important_layers(losses: Sequence[float], keep: int) -> list[int]:
    """The layers that stay: those whose score (the loss without them, or the angle that states turn in them) is
    highest; of equal ones the first."""
    order = sorted(range(len(losses)), key=lambda index: (-losses[index], index))
    return sorted(order[:keep])
