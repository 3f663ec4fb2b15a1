# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are quantized, which are left as they are, and why; and how to measure it.

What stays was found with [`output_errors`] on small models of all families (`benchmarks/quantization.py`), with random
weights: a kind is left out where quantizing it alone moves the outputs many times as far as its weights were moved,
and it is the one that decides. By judgment, so is what has few numbers, which mostly gate or decide something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.components import SLOTS
from ..modeling_base import XFormerPreTrainedModel
from .geometry import probe

# What stands between the last states and what is predicted. Quantized by itself, the map to tokens moved outputs by 2
# (Routing Transformer) to millions of times (DeltaNet) as much as the kind in the middle, the layer before it by
# thousands of times (BERT).
_OUTSIDE = "it stands between the last states and what is predicted"
_TOWERS = ("model.trunk.", "model.decoder.", "trunk.", "decoder.")
# What else stays is said by components themselves (`Spec.unquantized`): maps that decide something, which pass on many
# times their own error (in int8 gates of conditional computation 90 to 100 times, queries and keys of clusters 60 to
# 80 times, where kinds of other families pass on 12 times at most). Routers of experts are no linear modules.
# Heads of transformers' own models.
_HEADS = ("classifier", "score", "qa_outputs", "lm_head", "cls", "embed_out", "pooler.dense", "vocab_projector")
SMALLEST = 16  # inputs or outputs below which numbers are few, and mostly gate or decide


@dataclass(frozen=True)
class Split:
    """chosen: names of the modules that are quantized. kept: the other linear ones, each with the reason."""

    chosen: list[str]
    kept: dict[str, str]


def kind_of(name: str) -> str:
    """A module's name without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def linear_modules(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear module by name, tied ones once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def split(model: nn.Module, *, group_size: int | None = None, keep: Sequence[str] = ()) -> Split:
    """The modules to quantize. group_size: inputs that share a scale, of which a projection has to have a multiple.
    keep: ends of names that are left as they are besides the usual ones.

    Raises:
        ValueError: `keep` names something that is not there, or nothing is left to quantize.
    """
    modules = linear_modules(model)
    for wanted in keep:
        if not any(_ends(name, wanted) for name in modules):
            known = sorted({kind_of(name).rpartition("*.")[2] for name in modules})
            raise ValueError(
                f"--keep {wanted} names no linear module of the model; its kinds are {', '.join(known)}: correct it"
            )
    tied, named = _tied(model), named_by_components(model)
    chosen, kept = [], {}
    for name, module in modules.items():
        reason = next((why for end, why in named.items() if _ends(name, end)), None)
        if outside(model, name):
            reason = _OUTSIDE
        if any(_ends(name, wanted) for wanted in keep):
            reason = "--keep names it"
        elif id(module.weight) in tied:
            reason = "its weight is another module's, too"
        elif min(module.in_features, module.out_features) < SMALLEST:
            reason = f"it has {module.in_features} inputs and {module.out_features} outputs alone"
        elif group_size is not None and module.in_features % group_size:
            reason = f"its {module.in_features} inputs are no multiple of --group_size {group_size}"
        if reason is None:
            chosen.append(name)
        else:
            kept[name] = reason
    if not chosen:
        first = next(iter(kept.values()), "it has no linear module")
        raise ValueError(
            f"nothing of the model can be quantized ({first}); give a smaller --group_size, or --keep less"
        )
    return Split(chosen, kept)


def named_by_components(model: nn.Module) -> dict[str, str]:
    """Ends of names of linear modules that the components of a model say keep their precision, with the reasons."""
    if not isinstance(model, XFormerPreTrainedModel):
        return {}
    found: dict[str, str] = {}
    for view in model.config.tower_configs():
        for layer in view.layer_configs():
            for slot in SLOTS:
                found |= getattr(layer, slot).unquantized
    return found


def outside(model: nn.Module, name: str) -> bool:
    """Whether a module stands behind the layers of a model: heads and poolers."""
    if isinstance(model, XFormerPreTrainedModel):
        return not name.startswith(_TOWERS)
    return any(part in _HEADS for part in name.split(".")) or _ends(name, "pooler.dense")


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}") or kind_of(name) == end


def _tied(model: nn.Module) -> set[int]:
    """Weights that several modules have."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


def random_batch(model: Any) -> dict[str, Tensor]:
    """Inputs that outputs are compared on. Raises ValueError where a model of transformers reads neither tokens nor
    images of a known size."""
    if isinstance(model, XFormerPreTrainedModel):
        return probe(model)
    generator, config = torch.Generator().manual_seed(0), model.config
    size = getattr(config, "image_size", None)
    if model.main_input_name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.randn(4, config.num_channels, height, width, generator=generator)
        return {"pixel_values": images.to(model.dtype)}
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"--sensitivity compares outputs on random tokens or images, and {type(model).__name__} reads"
            f" {model.main_input_name}; leave it out"
        )
    ids = torch.randint(config.vocab_size, (4, 16), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**found, "decoder_input_ids": ids} if config.is_encoder_decoder else found


@torch.no_grad()
def output_errors(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    quantize: Callable[[nn.Linear], None],
    names: Iterable[str] | None = None,
) -> dict[str, float]:
    """By type of module, |y_q - y|^2 / |y|^2 of the model's outputs (logits, or last states) where that kind alone is
    quantized, a mean over batches; the largest first.

    quantize: quantizes one linear module in place. names: modules to look at (default: all linear ones).
    """
    modules = linear_modules(model)
    kinds: dict[str, list[nn.Linear]] = {}
    for name in modules if names is None else names:
        kinds.setdefault(kind_of(name), []).append(modules[name])
    given = [dict(batch) for batch in batches]
    model.eval()
    exact = [_outputs(model, batch) for batch in given]
    found = {}
    for kind, members in kinds.items():
        before = [dict(module._parameters) for module in members]
        try:
            for module in members:
                quantize(module)
            errors = [_relative(_outputs(model, batch), right) for batch, right in zip(given, exact)]
        finally:
            for module, parameters in zip(members, before):
                module._parameters.update(parameters)
        found[kind] = sum(errors) / len(errors)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _outputs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    outputs = model(**batch)
    for name in ("logits", "start_logits", "last_hidden_state"):
        if outputs.get(name) is not None:
            return outputs[name].float()
    return outputs[0].float()


def _relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).square().sum() / right.square().sum().clamp(min=1e-30))
