# SPDX-License-Identifier: Apache-2.0
"""Fewer layers than depths, or fewer attentions or feed-forward networks than layers: which runs where (Lan et al.
2020, arXiv 1909.11942, section 3.1 and table 4; Takase and Kiyono 2021, arXiv 2104.06022, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Order = Literal["sequence", "cycle", "cycle_rev"]
Part = Literal["all", "attention", "feedforward"]

# The types of sublayers that are shared; norms and other frames stay each layer's own.
_KINDS = {"attention": ("attention", "cross_attention"), "feedforward": ("feedforward",)}


def layer_map(depths: int, distinct: int, order: Order) -> list[int]:
    """The layer that runs at each of `depths` depths, of `distinct` ones.

    sequence: each runs depths / distinct times in a row. cycle: all in order, again and again. cycle_rev: the same,
    the last round in the reverse order.
    """
    if order == "sequence":
        return [depth * distinct // depths for depth in range(depths)]
    last = distinct * (-(-depths // distinct) - 1) if order == "cycle_rev" else depths
    return [depth % distinct if depth < last else distinct - 1 - depth % distinct for depth in range(depths)]


def is_shared(config) -> bool:
    """Whether depths of a tower share parameters, as its config's own fields say."""
    return config.distinct_layers is not None or config.layer_map is not None


def shares_parts(config) -> bool:
    """Whether layers are each depth's own, and share sublayers."""
    return is_shared(config) and config.share != "all"


def map_of(config) -> list[int]:
    """Which parameters run at each depth of a tower that shares them, numbered from 0 on."""
    if config.layer_map is not None:
        return list(config.layer_map)
    return layer_map(config.num_hidden_layers, config.distinct_layers, config.sharing)


def built_layers(config) -> int:
    """How many layers a tower is built with."""
    if not is_shared(config) or shares_parts(config):
        return config.stack.num_layers(config)
    return max(map_of(config)) + 1


def layer_at(config) -> list[int]:
    """The layer whose attention runs at each execution step of one tower."""
    steps, layers = config.stack.num_steps(config), config.stack.num_layers(config)
    if not is_shared(config):
        return [step % max(layers, 1) for step in range(steps)]
    places = map_of(config)
    if config.share == "all":
        return places
    owners = _lenders(places) if config.share == "attention" else list(range(layers))
    return [owners[step % layers] for step in range(steps)]


def part_owners(config) -> list[int]:
    """The layer that owns the shared part of each; nothing where layers share no parts."""
    return _lenders(map_of(config)) if shares_parts(config) else []


def _lenders(places: Sequence[int]) -> list[int]:
    """The first layer with the same parameters as each."""
    first: dict[int, int] = {}
    return [first.setdefault(place, depth) for depth, place in enumerate(places)]


def share_parts(config, layers: Sequence[Any]) -> None:
    """Lets layers that share sublayers run those of the first of them, and have none of their own.

    Raises:
        ValueError: two layers that should share a sublayer have different ones.
    """
    if not shares_parts(config):
        return
    kinds = _KINDS[config.share]
    for depth, owner in enumerate(_lenders(map_of(config))):
        if owner == depth:
            continue
        own, lender = layers[depth], layers[owner]
        for entry in own.plan:
            if entry.kind not in kinds:
                continue
            mine, theirs = own.function(entry), lender.function(entry)
            if _shapes(mine) != _shapes(theirs):
                raise ValueError(
                    f"`share` {config.share!r} runs the {entry.name} of layer {owner} in layer {depth}, too, and the"
                    f" two are not alike there ({type(theirs).__name__}, {type(mine).__name__}); give them different"
                    " numbers in `layer_map`, or the same settings."
                )
            own.borrow(entry, lender)


def _shapes(module: Any) -> tuple[type, dict[str, Any]]:
    return type(module), {name: tensor.shape for name, tensor in module.state_dict().items()}


def _hands_on(attention: Any, config: Any) -> bool:
    carry = attention.carries(config)
    return carry is not None and carry.handed_on


def check_sharing(config) -> None:
    """Refuses layers, or parts of them, that are shared over depth where a layer's place counts.

    Raises:
        ValueError: names what keeps them from being shared.
    """
    if not is_shared(config):
        if config.share != "all":
            raise ValueError(
                f"`share` {config.share!r} says what layers share, and none do; say how many there are"
                " (`distinct_layers`) or which (`layer_map`)."
            )
        return
    _check_numbers(config)
    depths, stack = config.num_hidden_layers, config.stack
    steps = depths if shares_parts(config) else stack.num_steps(config)
    if not (stack.num_layers(config) == steps == depths):
        raise ValueError(
            f"stack {stack.type!r} says itself which of its layers run at which depth, so `distinct_layers` and"
            " `layer_map` cannot; leave them out, or use the stack 'plain'."
        )
    if config.is_heterogeneous:
        raise ValueError(
            "`distinct_layers` and `layer_map` share parameters over depth, so single layers cannot differ; leave out"
            " `per_layer_config`."
        )
    attention = config.attention
    if config.share != "feedforward" and _hands_on(attention, config):
        raise ValueError(
            f"attention {attention.type!r} as it is set hands tensors from layer to layer, so that a layer's place"
            " counts, and `distinct_layers` or `layer_map` runs it at several; leave it out, use attention 'dense', or"
            " share the feed-forward networks alone (`share='feedforward'`)."
        )
    _check_plans(config)


def _check_numbers(config) -> None:
    depths, distinct, places = config.num_hidden_layers, config.distinct_layers, config.layer_map
    if distinct is not None and not 1 <= distinct <= depths:
        raise ValueError(
            f"`distinct_layers` {distinct} must be at least 1 and at most the tower's {depths} layers; None gives"
            " every depth a layer of its own."
        )
    if places is None:
        return
    if len(places) != depths:
        raise ValueError(
            f"`layer_map` {places} has {len(places)} entries for the tower's {depths} layers; give one for each (a"
            " decoder's stands in `decoder`)."
        )
    count = max(places) + 1
    if sorted(set(places)) != list(range(count)):
        raise ValueError(f"`layer_map` {places} must have every number from 0 to its largest; leave no gaps.")
    if distinct not in (None, count):
        raise ValueError(
            f"`layer_map` {places} has {count} different layers, and `distinct_layers` is {distinct}; leave that out."
        )


def _check_plans(config) -> None:
    """Every depth that shares with another has the same sublayers to share."""
    cross = config.is_decoder and config.is_encoder_decoder
    whole = config.share == "all"
    found: dict[int, tuple] = {}
    for depth, layer in enumerate(map_of(config)):
        plan = tuple(config.block.plan(config, depth, cross))
        if not whole:
            plan = tuple((e.name, e.kind, e.inner_scale) for e in plan if e.kind in _KINDS[config.share])
        if found.setdefault(layer, plan) != plan or not plan:
            what = "sublayers" if whole else f"sublayers of the kind {config.share!r}"
            raise ValueError(
                f"block {config.block.type!r} has other {what} at depth {depth} than at others where the same"
                " parameters would run (`distinct_layers`, `layer_map`); leave it out, or use the block 'vanilla'."
            )


def check_layer_drop(config) -> None:
    """Refuses LayerDrop where a layer that is left out would be missed.

    Raises:
        ValueError: names what would miss it.
    """
    if not config.layer_drop:
        return
    if "layer_drop" not in config.stack.supports:
        raise ValueError(
            f"stack {config.stack.type!r} does not run its layers one after the other, each adding to the same states,"
            " so none can be left out (`layer_drop`); set it to 0, or use the stack 'plain'."
        )
    for view in config.layer_configs():
        if _hands_on(view.attention, view):
            raise ValueError(
                f"attention {view.attention.type!r} as it is set hands tensors from layer to layer, so none can be"
                " left out (`layer_drop`); set it to 0, or use attention 'dense'."
            )
