"""Fewer layers than depths: which layer runs where, for any stack that runs each layer once (Lan et al. 2020, arXiv
1909.11942, section 3.1; Takase and Kiyono 2021, arXiv 2104.06022, section 3)."""

from __future__ import annotations

from typing import Literal

Order = Literal["sequence", "cycle", "cycle_rev"]


def layer_map(depths: int, distinct: int, order: Order) -> list[int]:
    """The layer that runs at each of `depths` depths, of `distinct` ones.

    sequence: each runs depths / distinct times in a row. cycle: all in order, again and again. cycle_rev: the same,
    the last round in the reverse order.
    """
    if order == "sequence":
        return [depth * distinct // depths for depth in range(depths)]
    last = distinct * (-(-depths // distinct) - 1) if order == "cycle_rev" else depths
    return [depth % distinct if depth < last else distinct - 1 - depth % distinct for depth in range(depths)]


def layer_at(config) -> list[int]:
    """The layer that runs at each execution step of one tower."""
    steps, layers = config.stack.num_steps(config), config.stack.num_layers(config)
    if config.distinct_layers is None:
        return [step % max(layers, 1) for step in range(steps)]
    return layer_map(steps, config.distinct_layers, config.sharing)


def check_sharing(config) -> None:
    """Refuses layers that are shared over depth where a layer's place counts.

    Raises:
        ValueError: names what keeps them from being shared.
    """
    if config.distinct_layers is None:
        return
    depths, distinct = config.num_hidden_layers, config.distinct_layers
    if not 1 <= distinct <= depths:
        raise ValueError(
            f"`distinct_layers` {distinct} must be at least 1 and at most the tower's {depths} layers; None gives"
            " every depth a layer of its own."
        )
    stack = config.stack
    if not (stack.num_layers(config) == stack.num_steps(config) == depths):
        raise ValueError(
            f"stack {stack.type!r} says itself which of its layers run at which depth, so `distinct_layers` cannot;"
            " leave it out, or use the stack 'plain'."
        )
    if config.is_heterogeneous:
        raise ValueError(
            "`distinct_layers` runs a layer at several depths, so single layers cannot differ; leave out"
            " `per_layer_config`."
        )
    attention = config.attention
    if attention.hands_on(config):
        raise ValueError(
            f"attention {attention.type!r} as it is set hands tensors from layer to layer, so that a layer's place"
            " counts, and `distinct_layers` runs it at several; leave it out, or use attention 'dense'."
        )
    cross = config.is_decoder and config.is_encoder_decoder
    plans: dict[int, tuple] = {}
    for depth, layer in enumerate(layer_map(depths, distinct, config.sharing)):
        plan = tuple(config.block.plan(config, depth, cross))
        if plans.setdefault(layer, plan) != plan:
            raise ValueError(
                f"block {config.block.type!r} has other sublayers at depth {depth} than at others where the same layer"
                " would run (`distinct_layers`); leave it out, or use the block 'vanilla'."
            )


def check_layer_drop(config) -> None:
    """Refuses LayerDrop where a layer that is left out would be missed.

    Raises:
        ValueError: names what would miss it.
    """
    if not config.layer_drop:
        return
    if not config.stack.drops_layers:
        raise ValueError(
            f"stack {config.stack.type!r} does not run its layers one after the other, each adding to the same states,"
            " so none can be left out (`layer_drop`); set it to 0, or use the stack 'plain'."
        )
    for view in config.layer_configs():
        if view.attention.hands_on(view):
            raise ValueError(
                f"attention {view.attention.type!r} as it is set hands tensors from layer to layer, so none can be"
                " left out (`layer_drop`); set it to 0, or use attention 'dense'."
            )


__all__ = ["Order", "check_layer_drop", "check_sharing", "layer_at", "layer_map"]
