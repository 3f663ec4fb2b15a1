# SPDX-License-Identifier: Apache-2.0
"""What the tensors of a swapped component are made of, where the old component's still have a meaning.

A tensor that both components have under one name and in one shape is kept; no rule is needed for that. The rules here
are for the rest: each reads the old part and the new part of a model and returns tensors for the new one. Rules of a
slot run for every component in it; rules of single components after them, on what is there then. What no rule makes
starts as the component itself says.

```python
from hf_xformers.conversion.derivations import Derived, derives

@derives("attention", "my_attention")
def second_query(old, new):
    return {"q2_proj.weight": Derived(old.tensors["q_proj.weight"].clone(), ("q_proj.weight",), "copied")}
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..configuration_xformer import XFormerConfig
from ..core.components import SLOTS


@dataclass(frozen=True)
class Part:
    """One component of a model. config: its layer's view. tensors: by name inside the part; the new part's have shapes
    only (they are on the meta device)."""

    spec: Any  # whose fields depend on its type
    config: XFormerConfig
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Derived:
    """A tensor for the new part. sources: names in the old part that it was made of. how: in a few words."""

    tensor: Tensor
    sources: tuple[str, ...]
    how: str


Rule = Callable[[Part, Part], dict[str, Derived]]
_RULES: dict[tuple[str, str | None], list[Rule]] = {}


def derives(slot: str, *types: str) -> Callable[[Rule], Rule]:
    """Decorator: enters a rule for a slot, or for single components (names) of it. Raises `ValueError` for another
    slot."""
    if slot not in SLOTS:
        raise ValueError(f"Unknown slot {slot!r}; the slots are: {', '.join(SLOTS)}.")

    def enter(rule: Rule) -> Rule:
        for name in types or (None,):
            _RULES.setdefault((slot, name), []).append(rule)
        return rule

    return enter


def derive(slot: str, old: Part, new: Part) -> dict[str, Derived]:
    """The tensors of `new` that can be made from `old`, beyond those that are the same."""
    if old.spec == new.spec and all(
        name in old.tensors and old.tensors[name].shape == tensor.shape for name, tensor in new.tensors.items()
    ):
        return {}
    made: dict[str, Derived] = {}
    slot = "attention" if slot == "cross_attention" else slot
    for rule in _RULES.get((slot, None), []) + _RULES.get((slot, new.spec.type), []):
        # A later rule reads what earlier ones made, under its new name.
        known = {**old.tensors, **{name: entry.tensor for name, entry in made.items()}}
        made.update(rule(replace(old, tensors=known), new))
    return made


def _lacks(old: Part, new: Part, name: str) -> bool:
    """Whether the new part wants `name` and the old one has no tensor of its shape there."""
    wanted = new.tensors.get(name)
    return wanted is not None and (name not in old.tensors or old.tensors[name].shape != wanted.shape)


# ---------------------------------------------------------------------------------------------------- attention


def regrouped(tensor: Tensor, heads: int, width: int) -> Tensor:
    """Key or value projections [K * width, ...] for another number of heads: the mean of those that one head now
    stands for (Ainslie et al. 2023, arXiv 2305.13245, section 2.1), or copies where there are more than before."""
    before = tensor.shape[0] // width
    common = math.lcm(before, heads)
    split = tensor.view(before, width, *tensor.shape[1:]).repeat_interleave(common // before, dim=0)
    means = split.view(heads, common // heads, *split.shape[1:]).to(torch.promote_types(tensor.dtype, torch.float32))
    return means.mean(1).flatten(0, 1).to(tensor.dtype)


@derives("attention")
def key_value_heads(old: Part, new: Part) -> dict[str, Derived]:
    """Another number of key and value heads of the same width."""
    made: dict[str, Derived] = {}
    width = new.config.head_width
    if width != old.config.head_width:
        return made
    for name in (
        f"{letter}{kind}_proj.{part}" for letter in "kv" for kind in ("", "_global") for part in ("weight", "bias")
    ):
        if name not in old.tensors or not _lacks(old, new, name):
            continue
        if name.startswith("k_") and "mixing" in new.tensors:  # keys for all heads together
            continue
        tensor, shape = old.tensors[name], new.tensors[name].shape
        if shape[0] % width or tensor.shape[0] % width or tensor.shape[1:] != shape[1:]:
            continue
        how = "mean over the heads of a group" if shape[0] < tensor.shape[0] else "repeated for each head"
        made[name] = Derived(regrouped(tensor, shape[0] // width, width), (name,), how)
    return made


@derives("attention")
def global_projections(old: Part, new: Part) -> dict[str, Derived]:
    """Projections of global tokens start as those of all tokens (Beltagy et al. 2020, section 3.1)."""
    made = {}
    for name, wanted in new.tensors.items():
        local = name.replace("_global_proj", "_proj")
        if local != name and _lacks(old, new, name) and local in old.tensors:
            if old.tensors[local].shape == wanted.shape:
                made[name] = Derived(old.tensors[local].clone(), (local,), "copied")
    return made


@derives("attention", "talking_heads")
def identity_mixing(old: Part, new: Part) -> dict[str, Derived]:
    """Heads that mix start as heads that do not: the source's function."""
    made = {}
    for name in ("score_mixing", "weight_mixing"):
        if _lacks(old, new, name) and len(set(new.tensors[name].shape)) == 1:
            wanted = new.tensors[name]
            dtype = next(iter(old.tensors.values())).dtype
            made[name] = Derived(torch.eye(wanted.shape[0], dtype=dtype), (), "identity, which mixes nothing")
    return made


# ---------------------------------------------------------------------------------------------------- feed-forward


@derives("feedforward")
def gates(old: Part, new: Part) -> dict[str, Derived]:
    """act(x W) as act(x W) * (x 0 + 1), and back to the gate alone."""
    made: dict[str, Derived] = {}
    up, gate = "up_proj.weight", "gate_proj.weight"
    if _lacks(old, new, gate) and gate not in old.tensors and up in old.tensors:
        if old.tensors[up].shape != new.tensors[gate].shape:
            return made
        for part in ("weight", "bias"):
            if f"gate_proj.{part}" in new.tensors and f"up_proj.{part}" in old.tensors:
                source = f"up_proj.{part}"
                made[f"gate_proj.{part}"] = Derived(
                    old.tensors[source].clone(), (source,), "copied: what is activated"
                )
        if "up_proj.bias" in new.tensors:
            tensor = old.tensors[up]
            made[up] = Derived(torch.zeros_like(tensor), (), "zero: multiplies by one")
            made["up_proj.bias"] = Derived(tensor.new_ones(tensor.shape[0]), (), "one: multiplies by one")
    elif gate in old.tensors and gate not in new.tensors and up in new.tensors:
        if old.tensors[gate].shape == new.tensors[up].shape:
            for part in ("weight", "bias"):
                source = f"gate_proj.{part}"
                if f"up_proj.{part}" in new.tensors and source in old.tensors:
                    made[f"up_proj.{part}"] = Derived(old.tensors[source].clone(), (source,), "what is activated")
    return made


@derives("feedforward")
def experts(old: Part, new: Part) -> dict[str, Derived]:
    """Every expert starts as the dense network (Komatsuzaki et al. 2023, arXiv 2212.05055, section 2.1)."""
    made = {}
    up = "gate_proj" if "gate_proj.weight" in old.tensors else "up_proj"  # what is activated
    for part, target in (("weight", "experts.gate_up_proj"), ("bias", "experts.gate_up_bias")):
        sources = (f"gate_proj.{part}", f"up_proj.{part}")
        if _lacks(old, new, target) and all(source in old.tensors for source in sources):
            both = torch.cat([old.tensors[source] for source in sources])
            count, *shape = new.tensors[target].shape
            if tuple(shape) == tuple(both.shape):
                copies = both.unsqueeze(0).repeat(count, *[1] * len(shape))
                made[target] = Derived(copies, sources, "copied to every expert")
    for target, source in (
        ("experts.up_proj", f"{up}.weight"),
        ("experts.up_bias", f"{up}.bias"),
        ("experts.down_proj", "down_proj.weight"),
        ("experts.down_bias", "down_proj.bias"),
    ):
        if _lacks(old, new, target) and source in old.tensors:
            count, *shape = new.tensors[target].shape
            if tuple(shape) == tuple(old.tensors[source].shape):
                copies = old.tensors[source].unsqueeze(0).repeat(count, *[1] * len(shape))
                made[target] = Derived(copies, (source,), "copied to every expert")
    return made


# ---------------------------------------------------------------------------------------------------- positions


@derives("position", "learned_absolute")
def position_table(old: Part, new: Part) -> dict[str, Derived]:
    """A table of another length or offset: repeated from its start (Beltagy et al. 2020, section 5), or cut; or the
    table of the sinusoids that it replaces."""
    name = "table.weight"
    wanted, offset = new.tensors[name], new.spec.offset
    count = wanted.shape[0] - offset
    if old.spec.type == "sinusoidal_absolute":
        from ..position.sinusoidal_absolute import sinusoids

        start = old.spec.offset - offset
        places = torch.arange(start, start + offset + count)
        table = sinusoids(places, wanted.shape[1], old.spec.base, old.spec.layout)
        return {name: Derived(table.to(wanted.dtype), (), "the sinusoids as a table")}
    if old.spec.type != "learned_absolute" or old.tensors[name].shape[1] != wanted.shape[1]:
        return {}
    table, before = old.tensors[name], old.spec.offset
    rows = table[before:]
    unused = table.new_zeros(offset, table.shape[1])
    kept = min(offset, before)
    unused[:kept] = table[:kept]
    tiled, how = _tiled(rows, count)
    return {name: Derived(torch.cat([unused, tiled]), (name,), how)}


@derives("position", "per_layer_position")
def tables_of_layers(old: Part, new: Part) -> dict[str, Derived]:
    """Tables of another length, as [`position_table`]."""
    made = {}
    for name, wanted in new.tensors.items():
        if name in old.tensors and _lacks(old, new, name):
            table, how = _tiled(old.tensors[name], wanted.shape[0])
            made[name] = Derived(table, (name,), how)
    return made


def _tiled(rows: Tensor, count: int) -> tuple[Tensor, str]:
    """`rows` repeated or cut to `count`, and what that is in words."""
    how = f"tiled from {rows.shape[0]} to {count} rows" if count > rows.shape[0] else f"the first {count} rows"
    return rows.repeat(-(-count // rows.shape[0]), 1)[:count], how


@derives("position", "t5_relative_bias")
def distance_buckets(old: Part, new: Part) -> dict[str, Derived]:
    """Other buckets: the mean of the old biases over a bucket's distances."""
    from ..position.t5_relative_bias import relative_buckets

    name = "table.weight"
    if old.spec.type != new.spec.type or old.tensors[name].shape[1] != new.tensors[name].shape[1]:
        return {}
    longest = 2 * max(old.spec.max_distance, new.spec.max_distance)
    two_sided = not new.config.is_decoder
    table = old.tensors[name]
    distance = torch.arange(-longest, longest + 1 if two_sided else 1, device=table.device)
    before, after = (
        relative_buckets(
            distance, bidirectional=two_sided, num_buckets=spec.num_buckets, max_distance=spec.max_distance
        )
        for spec in (old.spec, new.spec)
    )
    biases = table[before].to(torch.promote_types(table.dtype, torch.float32))
    sums = biases.new_zeros(new.tensors[name].shape).index_add_(0, after, biases)
    counts = torch.bincount(after, minlength=new.spec.num_buckets).clamp(min=1)
    return {name: Derived((sums / counts[:, None]).to(table.dtype), (name,), "mean over each bucket's distances")}
