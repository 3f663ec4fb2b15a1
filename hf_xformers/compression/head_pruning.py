# SPDX-License-Identifier: Apache-2.0
"""Attention without some of its heads: the rows and columns of removed heads leave the projections, and with them
whatever else a mechanism or a position keeps for single heads.

The model that is left computes what the whole one does with the gates of the removed heads at 0 (Michel, Levy and
Neubig 2019, arXiv 1905.10650, section 2.3). That is not taken on trust: every removal is compared with the gated model
on a probe, so that a mechanism whose heads know of each other is refused, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.shared.base import Attention
from ..blocks.base import XFormerLayer
from ..compat import shared_setting
from ..configuration_xformer import XFormerConfig
from ..core.evaluating import evaluating
from ..modeling_tower import XFormerTower
from .geometry import agree, built, config_with, own_layers, remade, tower_fields, towers_of
from .report import refuse_any_adapter

# Which heads each attention of a layer keeps, by (tower, layer): one list for each attention, in the layer's order.
Kept = dict[tuple[str, int], list[list[int]]]
_ROWS = {"num_attention_heads", "num_key_value_heads", "head_dim"}


@dataclass(frozen=True)
class HeadLayer:
    """The attentions of one layer, which have as many heads each. names: of the modules, from the model on."""

    tower: str
    index: int
    names: tuple[str, ...]
    modules: tuple[Attention, ...]

    @property
    def key(self) -> tuple[str, int]:
        return (self.tower, self.index)

    @property
    def heads(self) -> int:
        return self.modules[0].num_heads

    @property
    def key_heads(self) -> int:
        return self.modules[0].num_key_value_heads

    @property
    def unit(self) -> int:
        """Heads that leave together: those that share keys, where several groups do."""
        return self.heads // self.key_heads if 1 < self.key_heads < self.heads else 1

    @property
    def units(self) -> int:
        return self.heads // self.unit

    def heads_of(self, units: Sequence[int]) -> list[int]:
        return [unit * self.unit + offset for unit in sorted(units) for offset in range(self.unit)]

    def key_heads_left(self, heads: int) -> int:
        """Heads of keys and values where so many heads are left."""
        return 1 if self.key_heads == 1 else heads * self.key_heads // self.heads


def head_layers(model: PreTrainedModel) -> list[HeadLayer]:
    """The layers whose heads can be told apart where they enter the output projection.

    Raises:
        ValueError: there are none; says why.
    """
    found, reasons = [], []
    for tower_name, tower in towers_of(model).items():
        for index, layer in enumerate(tower.layers):
            inside = [(name, part) for name, part in layer.named_modules() if isinstance(part, Attention)]
            wrong = next((reason for _, part in inside if (reason := why_not(part))), None)
            if wrong is None and len({(part.num_heads, part.num_key_value_heads) for _, part in inside}) > 1:
                wrong = "the attentions of a layer have different numbers of heads"
            if inside and wrong is None:
                prefix = f"{tower_name}.layers.{index}" if tower_name else f"layers.{index}"
                names = tuple(f"{prefix}.{name}" for name, _ in inside)
                found.append(HeadLayer(tower_name, index, names, tuple(part for _, part in inside)))
            elif wrong is not None:
                reasons.append(wrong)
    if not found:
        reason = reasons[0] if reasons else "no layer has attention"
        raise ValueError(
            f"the heads of {type(model).__name__} cannot be removed: {reason}; take `--method layers` or `--method"
            " weights`"
        )
    return found


def why_not(attention: Attention) -> str | None:
    """Why no head of an attention can be removed, in a few words; None if nothing is known against it."""
    spec, output = attention.spec, getattr(attention, "o_proj", None)
    heads, width = getattr(attention, "num_heads", None), getattr(attention, "head_dim", None)
    if spec.aggregation is not None:
        return f"the aggregation {cast(Any, spec.aggregation).type!r} of attention {spec.type!r} joins all of them"
    if not isinstance(output, nn.Linear) or heads is None or width is None:
        return f"attention {spec.type!r} has no output projection that they enter side by side"
    if output.in_features != heads * width:
        return f"the output projection of attention {spec.type!r} does not read them side by side"
    if spec.query_key_norm == "projection":
        return "`query_key_norm='projection'` normalizes them together"
    if spec.query_key_norm == "each_head":
        return "`query_key_norm='each_head'` has a gain for each of them"
    return None


# ------------------------------------------------------------------------------------------------ gates


@contextmanager
def gated(layers: Sequence[HeadLayer], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies what each head has read, before the output projection, by its gate. gates: by module name, [H] for
    all rows or [B, H] for each its own."""
    handles = [
        module.o_proj.register_forward_pre_hook(_times(gates[name]))
        for layer in layers
        for name, module in zip(layer.names, layer.modules)
        if name in gates
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _times(gate: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (times_gates(args[0], gate), *args[1:])

    return hook


def times_gates(joined: Tensor, gate: Tensor) -> Tensor:
    """joined [B, ..., H * d], gate [H] or [B, H] -> [B, ..., H * d], head h times gate h."""
    heads = joined.unflatten(-1, (gate.shape[-1], -1))
    shape = [1] * (heads.ndim - 2) + [gate.shape[-1], 1]
    if gate.ndim == 2:
        shape[0] = gate.shape[0]
    return (heads * gate.to(heads.dtype).view(shape)).flatten(-2)


# ------------------------------------------------------------------------------------------------ removal


def whole(layers: Sequence[HeadLayer]) -> Kept:
    """All heads of all layers."""
    return {layer.key: [list(range(layer.heads)) for _ in layer.modules] for layer in layers}


def prune_heads(model: PreTrainedModel, kept: Kept, *, check: bool = True) -> PreTrainedModel:
    """The model with these heads alone, in evaluation mode; `model` stays as it is and shares no memory with it.
    check: whether the result is compared with the gated model.

    Raises:
        ValueError: a layer that has no such heads, no head left in one, heads that leave keys behind, or a mechanism
            or position whose heads cannot be told apart, or an adapter.
    """
    refuse_any_adapter(model, type(model).__name__)
    layers = head_layers(model)
    known = whole(layers)
    if odd := [key for key in kept if key not in known]:
        raise ValueError(
            f"{type(model).__name__} has no heads to remove in {odd[0]}; layers with heads are"
            f" {', '.join(map(str, known))}"
        )
    kept = {**known, **kept}
    for layer in layers:
        _check_layer(layer, kept[layer.key])
    changed = [layer for layer in layers if len(kept[layer.key][0]) < layer.heads]
    try:
        config = _config_without(model, layers, kept)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} cannot lose these heads, since its config would be refused ({error}); take"
            " `--method layers` or `--method weights`"
        ) from error
    names = {name: (layer, heads) for layer in changed for name, heads in zip(layer.names, kept[layer.key])}
    state = model.state_dict()

    def take(name: str, shape: torch.Size) -> Tensor | None:
        tensor = state.get(name)
        if tensor is None or tensor.shape == shape:
            return tensor
        part = next((found for found in names if name.startswith(f"{found}.")), None)
        if part is not None:
            return _cut(tensor, shape, *names[part])
        tower = next((layer for layer in changed if name.startswith(f"{layer.tower}.position.".lstrip("."))), None)
        if tower is None:
            return None
        rows = [
            heads
            for layer in layers
            for module, heads in zip(layer.modules, kept[layer.key])
            if layer.tower == tower.tower and not module.cross
        ]
        return _cut(tensor, shape, tower, rows[0]) if all(heads == rows[0] for heads in rows) else None

    pruned = remade(model, config, take)
    if check and not agree_with_gates(model, pruned, layers, kept):
        kinds = ", ".join(sorted({repr(layer.modules[0].spec.type) for layer in changed}))
        raise ValueError(
            f"without some heads {type(model).__name__} does not compute what it does with their gates at 0: heads of"
            f" attention {kinds} with position {cast(Any, model.config).position.type!r} know of each other or of"
            " their number; take `--method layers` or `--method weights`"
        )
    return pruned


def agree_with_gates(model: PreTrainedModel, pruned: PreTrainedModel, layers: Sequence[HeadLayer], kept: Kept) -> bool:
    """Whether a pruned model computes what the whole one does with closed gates."""
    gates = {}
    for layer in layers:
        for name, heads in zip(layer.names, kept[layer.key]):
            gate = torch.zeros(layer.heads, device=model.device)
            gate[heads] = 1
            gates[name] = gate
    with evaluating(model), gated(layers, gates):
        return agree(model, pruned)


def _check_layer(layer: HeadLayer, kept: Sequence[Sequence[int]]) -> None:
    place = f"layer {layer.index}" + (f" of {layer.tower!r}" if "decoder" in layer.tower else "")
    for heads in kept:
        if not heads:
            raise ValueError(
                f"{place} would lose all of its {layer.heads} heads; leave it one, or remove the whole layer with"
                " `--method layers`"
            )
        beyond = [head for head in heads if not 0 <= head < layer.heads]
        if beyond or len(set(heads)) < len(heads):
            raise ValueError(f"{place} has heads from 0 to {layer.heads - 1}, each once, and not {list(heads)}")
        if layer.heads_of(sorted({head // layer.unit for head in heads})) != sorted(heads):
            raise ValueError(
                f"{layer.unit} heads each of {place} share their keys and leave together; remove whole groups, such as"
                f" heads {list(range(layer.unit))}"
            )
    if len(kept) != len(layer.modules) or len({len(heads) for heads in kept}) > 1:
        raise ValueError(
            f"{place} has {len(layer.modules)} attentions of as many heads each; say which heads stay of each of them,"
            " and remove as many of each"
        )


def _with_own_attention(tower: XFormerTower) -> int:
    """Layers of a tower but those that borrow their attention from another."""
    return sum("attention" not in cast(XFormerLayer, layer).lenders for layer in tower.layers)


def _config_without(model: PreTrainedModel, layers: Sequence[HeadLayer], kept: Kept) -> XFormerConfig:
    """The config with the heads that are left, by layer where layers differ."""
    config = cast(XFormerConfig, model.config)
    changes: dict[str, Any] = {}
    for tower_name, tower in towers_of(model).items():
        decodes = config.is_encoder_decoder and bool(tower.config.is_decoder)
        own = own_layers(config, decodes)
        mine = [layer for layer in layers if layer.tower == tower_name]
        counts = {layer.index: (len(kept[layer.key][0]), layer) for layer in mine}
        fields = {
            index: {
                "num_attention_heads": heads,
                "head_dim": layer.modules[0].head_dim,
                "num_key_value_heads": None if layer.key_heads == layer.heads else layer.key_heads_left(heads),
            }
            for index, (heads, layer) in counts.items()
        }
        everywhere = len(mine) == _with_own_attention(tower) and all(
            entry == fields[mine[0].index] for entry in fields.values()
        )
        if everywhere:
            left = {n: {k: v for k, v in entry.items() if k not in _ROWS} for n, entry in own.items()}
            made = {**fields[mine[0].index], "per_layer_config": {n: e for n, e in left.items() if e} or None}
        else:
            now = {layer.index: layer.heads for layer in mine}
            merged = {
                n: {
                    **own.get(n, {}),
                    **(fields[n] if n in fields and fields[n]["num_attention_heads"] < now[n] else {}),
                }
                for n in sorted({*own, *fields})
            }
            made = {"per_layer_config": {n: e for n, e in merged.items() if e} or None}
        if decodes:
            view: Any = tower.config
            inherited = {name: shared_setting(view, name) for name in _ROWS}
            inherited["head_dim"] = inherited["head_dim"] or mine[0].modules[0].head_dim if mine else None
            made = {**{key: value for key, value in inherited.items() if value is not None}, **made}
        changes = {**changes, **tower_fields(config, decodes, made)}
    return config_with(config, changes)


def _cut(tensor: Tensor, shape: torch.Size, layer: HeadLayer, heads: Sequence[int]) -> Tensor | None:
    """A tensor without the parts of removed heads, along every axis that heads stand on side by side."""
    if len(tensor.shape) != len(shape):
        return None
    groups = sorted({head // (layer.heads // layer.key_heads) for head in heads})
    kinds = ((layer.heads, sorted(heads)), (layer.key_heads, groups))
    for axis, (old, new) in enumerate(zip(tensor.shape, shape)):
        if old == new:
            continue
        fits = [(count, chosen) for count, chosen in kinds if old % count == 0 and old // count * len(chosen) == new]
        if not fits:
            return None
        count, chosen = fits[0]
        parts = tensor.unflatten(axis, (count, old // count))
        index = torch.tensor(chosen, device=tensor.device)
        tensor = parts.index_select(axis, index).flatten(axis, axis + 1)
    return tensor


# ------------------------------------------------------------------------------------------------ what must be alike


def alike_by_tower(model: PreTrainedModel, layers: Sequence[HeadLayer]) -> dict[str, str]:
    """'free' where layers of a tower may differ in their heads, 'counts' where all must have as many, 'heads' where
    they must be the same ones, since the position has a table of them for all layers."""
    found = {}
    for tower_name, tower in towers_of(model).items():
        mine = [layer for layer in layers if layer.tower == tower_name]
        if not mine:
            continue
        position = tower.config.position
        if "score_bias" in position.acts or position.shares_tables:
            found[tower_name] = "heads"
            continue
        first = mine[0]
        heads = first.heads - first.unit
        if heads < 1 or len(mine) < 2:
            found[tower_name] = "free" if _with_own_attention(tower) == tower.config.num_hidden_layers else "counts"
            continue
        trial: Kept = {first.key: [list(range(heads)) for _ in first.modules]}
        try:
            built(model, _config_without(model, layers, {**whole(layers), **trial}))
            found[tower_name] = "free"
        except ValueError:
            found[tower_name] = "counts"
    return found
