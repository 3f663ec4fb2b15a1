# SPDX-License-Identifier: Apache-2.0
"""What heads and layers are worth to a trained model, on data.

A head: I_h = E_x |dL(x) / d xi_h| at gates xi = 1, the scores of a layer divided by their l2 norm (Michel, Levy and
Neubig 2019, arXiv 1905.10650, section 4.1). A layer: how much the loss grows without it, or how little the states turn
in it (Gromov et al. 2024, arXiv 2403.17887, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..blocks.base import LayerOutput, XFormerLayer
from ..core.evaluating import evaluating
from ..core.prepared import States
from ..modeling_tower import XFormerTower
from .head_pruning import HeadLayer, Kept, times_gates

Batch = Mapping[str, Any]
# By (tower, layer): [attentions of the layer, H].
Importance = dict[tuple[str, int], Tensor]


@contextmanager
def _at_rest(model: PreTrainedModel):
    """Evaluation mode, no gradient of parameters, padding left in: as it was at the end."""
    learns = {parameter: parameter.requires_grad for parameter in model.parameters()}
    configs = [module.config for module in model.modules() if isinstance(module, XFormerTower)]
    unpads = [config.unpad_inputs for config in configs]
    model.requires_grad_(False)
    for config in configs:
        config.unpad_inputs = False
    try:
        with evaluating(model):
            yield
    finally:
        for parameter, wanted in learns.items():
            parameter.requires_grad_(wanted)
        for config, wanted in zip(configs, unpads):
            config.unpad_inputs = wanted


def _loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    loss = model(**{name: _moved(value, model.device) for name, value in batch.items()}).loss
    if loss is None:
        raise ValueError(
            f"the rows give {type(model).__name__} no labels to measure a loss with; give rows with true answers"
            " (--data)"
        )
    return loss


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _rows(batch: Batch) -> int:
    return next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))


def head_importance(model: PreTrainedModel, layers: Sequence[HeadLayer], batches: Iterable[Batch]) -> Importance:
    """The mean over rows of |dL / d xi_h|, not yet normalized; L: the loss of a row, as its batch's mean counts it.

    Raises:
        ValueError: no rows, or rows without labels.
    """
    found = {layer.key: torch.zeros(len(layer.modules), layer.heads, dtype=torch.float64) for layer in layers}
    total = 0
    with _at_rest(model):
        for batch in batches:
            rows = _rows(batch)
            gates: dict[tuple[tuple[str, int], int], list[Tensor]] = {}
            with ExitStack() as stack:
                for layer in layers:
                    for place, module in enumerate(layer.modules):
                        kept = gates.setdefault((layer.key, place), [])
                        handle = module.o_proj.register_forward_pre_hook(_own_gate(layer.heads, kept))
                        stack.callback(handle.remove)
                loss = _loss(model, batch)
            flat = [(key, place, gate) for (key, place), made in gates.items() for gate in made]
            gradients = torch.autograd.grad(loss, [gate for _, _, gate in flat], allow_unused=True)
            sums: dict[tuple[tuple[str, int], int], Tensor] = {}
            for (key, place, _), gradient in zip(flat, gradients):
                if gradient is None:
                    continue
                slot = (key, place)
                if slot in sums and sums[slot].shape == gradient.shape:  # a layer that runs several times
                    sums[slot] = sums[slot] + gradient
                else:
                    sums[slot] = gradient
            for (key, place), gradient in sums.items():
                found[key][place] += gradient.double().abs().sum(0).cpu() * rows  # each row's own loss, not its share
            total += rows
    if not total:
        raise ValueError("there are no rows to measure importance with; give more --data or a higher --rows")
    return {key: value / total for key, value in found.items()}


def _own_gate(heads: int, kept: list[Tensor]) -> Any:
    """A hook that puts a gate of 1 before every head of every row, and keeps it for its gradient."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gate = torch.ones(args[0].shape[0], heads, device=args[0].device, dtype=torch.float32, requires_grad=True)
        kept.append(gate)
        return (times_gates(args[0], gate), *args[1:])

    return hook


def normalised(importance: Importance) -> Importance:
    """The scores of each attention divided by their l2 norm."""
    return {key: value / value.norm(dim=-1, keepdim=True).clamp(min=1e-30) for key, value in importance.items()}


def least_important(
    layers: Sequence[HeadLayer], importance: Importance, share: float, alike: Mapping[str, str], *, by_layer: bool
) -> Kept:
    """Which heads are left without the least important `share` of all, one in each layer at least.

    alike: by tower, whether layers may differ ([`alike_by_tower`](head_pruning.py)). by_layer: the same share of every
    layer in any case.

    Raises:
        ValueError: the share leaves no head, or takes none.
    """
    scores = {layer.key: _unit_scores(layer, importance[layer.key]) for layer in layers}
    units = sum(layer.units for layer in layers)
    wanted = round(share * units)
    most = sum(layer.units - 1 for layer in layers)
    if not 0 < share < 1 or wanted > most:
        raise ValueError(
            f"--share {share} takes {wanted} of {units} heads or groups of heads, and {most} at most can go, since"
            " each layer keeps one; take a smaller share, or remove layers with `--method layers`"
        )
    if wanted < 1:
        raise ValueError(f"--share {share} of {units} heads or groups of heads is none; take a larger share")
    gone: dict[tuple[str, int], int] = {layer.key: 0 for layer in layers}
    free = [layer for layer in layers if alike[layer.tower] == "free" and not by_layer]
    ranked = sorted(
        (float(scores[layer.key].sort(dim=-1).values[:, rank].sum()), place, rank)
        for place, layer in enumerate(free)
        for rank in range(layer.units - 1)  # the best one stays
    )
    for _, place, _ in ranked[: round(share * sum(layer.units for layer in free))]:
        gone[free[place].key] += 1
    kept: Kept = {}
    for layer in layers:
        if layer not in free:
            gone[layer.key] = min(round(share * layer.units), layer.units - 1)
        order = scores[layer.key].argsort(dim=-1, stable=True)
        if alike[layer.tower] == "heads":  # the same ones in all layers, but where another text is read
            mine = [
                row
                for other in layers
                if other.tower == layer.tower
                for module, row in zip(other.modules, scores[other.key])
                if not module.cross
            ]
            common = torch.stack(mine).sum(0).argsort(stable=True)
            order = torch.stack([own if m.cross else common for m, own in zip(layer.modules, order)])
        kept[layer.key] = [layer.heads_of(row[gone[layer.key] :].tolist()) for row in order]
    return kept


def _unit_scores(layer: HeadLayer, scores: Tensor) -> Tensor:
    """[attentions, H] -> [attentions, units]: the sum of heads that leave together."""
    return scores.unflatten(-1, (layer.units, layer.unit)).sum(-1)


# ------------------------------------------------------------------------------------------------ layers


def layer_losses(model: PreTrainedModel, tower: XFormerTower, batches: Iterable[Batch]) -> tuple[float, list[float]]:
    """(mean loss over rows, the same without each layer of the tower)."""
    whole, without, total = 0.0, [0.0] * len(tower.layers), 0
    with _at_rest(model), torch.no_grad():
        for batch in batches:
            rows = _rows(batch)
            whole += float(_loss(model, batch)) * rows
            for index, layer in enumerate(tower.layers):
                with skipped([cast(XFormerLayer, layer)]):
                    without[index] += float(_loss(model, batch)) * rows
            total += rows
    if not total:
        raise ValueError("there are no rows to measure importance with; give more --data or a higher --rows")
    return whole / total, [value / total for value in without]


@contextmanager
def skipped(layers: Sequence[XFormerLayer]):
    """Layers that pass on what they are given."""
    before = [vars(layer).get("run") for layer in layers]
    for layer in layers:
        layer.run = _passing  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, found in zip(layers, before):
            if found is None:
                del layer.run
            else:
                layer.run = found  # type: ignore[method-assign]


def _passing(hidden_states: Tensor, memory: Tensor | None, states: States, **_: Any) -> LayerOutput:
    return LayerOutput(hidden_states, states, {})


def layer_angles(model: PreTrainedModel, tower: XFormerTower, batches: Iterable[Batch]) -> list[float]:
    """The mean angle, in half turns, between the states that each layer is given and those that it gives, over real
    tokens."""
    sums, total = [0.0] * len(tower.layers), 0
    found: list[tuple[int, Tensor, Tensor]] = []

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            found.append((index, given.detach(), output[0].detach()))

        return hook

    handles = [layer.register_forward_hook(keep(i), with_kwargs=True) for i, layer in enumerate(tower.layers)]
    try:
        with _at_rest(model), torch.no_grad():
            for batch in batches:
                found.clear()
                model(**{name: _moved(value, model.device) for name, value in batch.items()})
                mask = _real(batch, decodes="decoder" in _side(model, tower))
                for index, given, left in found:
                    if given.shape != left.shape:
                        raise ValueError(
                            "states change their size from layer to layer, so they turn no angle; choose layers by"
                            " --by loss, top or alternate"
                        )
                    cosine = nn.functional.cosine_similarity(given.double(), left.double(), dim=-1).clamp(-1, 1)
                    angle = torch.acos(cosine) / torch.pi
                    if isinstance(mask, Tensor) and mask.shape == angle.shape:
                        angle = angle[mask.to(angle.device).bool()]
                    sums[index] += float(angle.mean()) * _rows(batch)
                total += _rows(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not total:
        raise ValueError("there are no rows to measure importance with; give more --data or a higher --rows")
    return [value / total for value in sums]


def _real(batch: Batch, *, decodes: bool) -> Any:
    """Which tokens of a tower are no padding; those of a decoder by its labels, where it reads these."""
    if not decodes:
        return batch.get("attention_mask")
    labels = batch.get("labels") if batch.get("decoder_input_ids") is None else None
    return batch.get("decoder_attention_mask", None if labels is None else labels != -100)


def _side(model: PreTrainedModel, tower: XFormerTower) -> str:
    return next(name for name, module in model.named_modules() if module is tower)
