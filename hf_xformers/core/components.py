# SPDX-License-Identifier: Apache-2.0
"""Component slots, their specs and registries.

An X-former is the vanilla Transformer with one or more *components* replaced. A component is described by a *spec*: a
small strict dataclass that stands in the same file as the module it configures and registers itself under a name in
one of the slots below. A config stores one spec per slot; the model builds its modules from them.

This file imports none of the component packages: one is imported the first time one of its names is looked up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast, dataclass_transform

from .bounds import bounded, check_layers
from .hand_overs import HandOver, check_hand_overs
from .specs import (
    Registry,
    TypedSpec,
    aliased,
    build_in,
    canonical_fields,
    did_you_mean,
    field_aliases,
    record_lookups,
    register_in,
    resolve_field_types,
)

AnyComponent = TypeVar("AnyComponent", bound="Spec")


@dataclass(kw_only=True)
class Spec(TypedSpec):
    """Base of all component specs.

    A subclass declares typed fields with the paper's defaults, is registered with [`register`], and implements
    `build(config, **where)`, which returns the component's module.

    Attributes:
        inputs: further model inputs that the component reads, by keyword name; they reach it in `context.inputs`, and
            an embedding as keyword arguments.
        tensor_parallel: whether the component gives the same in every process of a tensor-parallel group.
        layers_apart: whether parameters of a layer are read inside that layer's call alone, so that they may be
            sharded layer by layer (FSDP).
        not_taken_over: fields that mean something else here than in other components of the slot: put in the place of
            one, it starts with its own defaults there.
        supports: what of a call it can be right with. `packed_rows`: documents of a packed row that stay apart
            (`context.segment_ids`). `context_parallel`: a part of every text in each process (single tokens with their
            positions, and SDPA in causal order without a mask or bias). Of attentions, `pair_mask`: a prepared mask
            (`context.explicit_mask`); `pages`: keys and values of many texts side by side, any of which a mask of
            pairs may hide (continuous batching); `interface`: its usual path is transformers' attention interface,
            with queries, keys and values and nothing more, so that a function registered there may do all of it;
            `token_numbers`: a number for each token, kept next to its key (`TokenNumbers`); `mixer`: a place next to
            another attention of the layer, with a state of its own. Of positions, `neighbors`: a bias that is a
            function of the distance alone, so that a part of a text can read its neighbors. Of stacks and blocks,
            `unpadding`: the real tokens of a batch as one row (`unpad_inputs`). Of stacks, `choices`: what layers give
            is added up row by row and as it is, so that probabilities of choices come through (`core/choices.py`);
            `layer_drop`: a layer may be left out of a training step.
        why_not: why it does not support something, in words: `unpadding` or `pages`; and of attentions, `causal`
            order; generation (`generate`); and a graph that is exported for texts of `any_length`.
        splits: what tensor or expert parallelism may divide over processes. `heads` of an attention: no parameter,
            buffer or pattern of a single head besides the projections, and no exchange between heads. The rows of an
            embedding's one `table`, `tokens`, which is read by calling it alone; the `vocabulary` of a head's
            projection, `decoder`; the `inner` channels of a feed-forward, by the names `up_proj`, `gate_proj` and
            `down_proj`, and its `experts`.
        unquantized: linear maps inside it that keep their precision when a model is quantized, by the ends of their
            names, each with the reason: a small change of theirs is a large one of the outputs, as
            `compression/quantizable.py` measures it.
        citation: BibTeX of its paper, of a component that no family is named after.
        gives, reads: what it makes for another component, and needs another one to make (`core/hand_overs.py`).
    """

    slot: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    inputs: ClassVar[tuple[str, ...]] = ()
    tensor_parallel: ClassVar[bool] = True
    layers_apart: ClassVar[bool] = True
    not_taken_over: ClassVar[tuple[str, ...]] = ()
    supports: ClassVar[frozenset[str]] = frozenset()
    why_not: ClassVar[Mapping[str, str]] = MappingProxyType({})
    splits: ClassVar[frozenset[str]] = frozenset()
    unquantized: ClassVar[Mapping[str, str]] = MappingProxyType({})
    gives: ClassVar[frozenset[HandOver]] = frozenset()
    reads: ClassVar[frozenset[HandOver]] = frozenset()

    def check(self, config: Any) -> None:
        """Checks of this spec against the config that holds it (one tower's view of it)."""

    def common_settings(self) -> dict[str, Any]:
        """What means the same in all components of the slot that have a field of that name: one that is put in this
        one's place takes it over."""
        return {}

    def build(self, config: Any, **where: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say which module it builds.")


if TYPE_CHECKING:  # written as a name, a dict or a spec; read as a spec, whose fields depend on its type
    SpecLike: TypeAlias = Any
else:
    SpecLike = str | dict | Spec


class Slot(Registry[Spec]):
    """One registry: the names that a config field of this slot accepts."""

    def __init__(self, name: str, room: str | None = None):
        super().__init__(name, room or name, kind=f"{name} component")

    def holds(self, spec: TypedSpec) -> bool:
        return isinstance(spec, Spec) and SLOTS.get(spec.slot) is self


SLOTS: dict[str, Slot] = {
    "embedding": Slot("embedding"),
    "position": Slot("position"),
    "attention": Slot("attention"),
    "cross_attention": Slot("attention"),
    "normalization": Slot("normalization"),
    "residual": Slot("residual", room="normalization"),
    "feedforward": Slot("feedforward"),
    "block": Slot("block", room="blocks"),
    "stack": Slot("stack", room="stacks"),
    "head": Slot("head", room="heads"),
}
SLOTS["cross_attention"] = SLOTS["attention"]  # one registry: a mechanism says itself whether it can read a memory


@dataclass_transform(kw_only_default=True, field_specifiers=(field, aliased))
def register(
    slot: str, name: str, *, aliases: tuple[str, ...] = ()
) -> Callable[[type[AnyComponent]], type[AnyComponent]]:
    """Class decorator: makes `cls` a strict dataclass and registers it as component `name` of `slot`.

    Raises:
        TypeError: a class that is no spec.
        ValueError: there is no such slot, or the name or an alias is taken.
    """
    if slot not in SLOTS:
        raise ValueError(f"There is no slot {slot!r}.{did_you_mean(slot, SLOTS)} The slots are {', '.join(SLOTS)}.")

    def wrap(cls: type[AnyComponent]) -> type[AnyComponent]:
        if not issubclass(cls, Spec):
            raise TypeError(f"{cls.__qualname__} is no spec; derive it from `Spec`, or from the base of its slot.")
        cls = register_in(cast("Registry[AnyComponent]", SLOTS[slot]), cls, name, aliases)
        cls.slot = slot
        return cls

    return wrap


def preset(value: Any) -> Any:
    """The default of a config's field, made anew for every config."""
    return field(default_factory=lambda: copy.deepcopy(value))


def build_spec(slot: str, value: SpecLike) -> Spec:
    """The spec that `value` (a name, a dict with `type`, or a spec) stands for.

    Raises:
        TypeError: `value` or one of its fields has a wrong type.
        ValueError: unknown name or field (the message lists the valid ones), or a value out of range.
    """
    return build_in(SLOTS[slot], value, slot)


def names(slot: str) -> list[str]:
    """All component names that `slot` accepts, sorted."""
    if slot not in SLOTS:
        raise ValueError(f"Unknown slot {slot!r}; the slots are: {', '.join(SLOTS)}.")
    return list(SLOTS[slot])


def check_components(config: Any) -> None:
    """Refuses combinations that cannot work, for one tower's view of a config.

    Specs declare capabilities as class variables; every rule that involves two components is here, so that each
    refusal is one sentence that names both and says what would work instead.

    Raises:
        ValueError: the first combination that cannot work.
    """
    attention, position, cross = config.attention, config.position, config.cross_attention
    if config.is_decoder and "causal" in attention.why_not:
        raise ValueError(
            f"attention {attention.type!r} has no causal form and cannot stand in a decoder:"
            f" {attention.why_not['causal']} Use it in an encoder, or give the decoder another mechanism, e.g."
            " `decoder={'attention': 'dense'}` in an encoder-decoder."
        )
    if not config.is_decoder and not attention.bidirectional:
        raise ValueError(
            f"attention {attention.type!r} is causal only and cannot stand in an encoder; use it with"
            " `is_decoder=True` (the causal LM classes do), or choose a bidirectional mechanism such as 'dense'."
        )
    for slot in ("attention", "cross_attention"):
        _check_heads(slot, getattr(config, slot), config)
    if attention.angles == "local" and not position.has_local:
        raise ValueError(
            f"attention {attention.type!r} with `angles='local'` asks for a second rotation, which position"
            f" {position.type!r} as it is set has not; give a rotary position its `local_theta`."
        )
    if not cross.cross:
        raise ValueError(f"attention {cross.type!r} cannot read a memory as `cross_attention`; use 'dense' there.")
    for act, what in (
        ("score_bias", "adds a bias to attention scores"),
        ("rotation", "rotates queries and keys"),
        ("score_terms", "adds terms of queries and keys to attention scores"),
        ("head_terms", "adds to the queries, keys and values of every layer"),
    ):
        if act in position.acts - attention.acts:
            raise ValueError(
                f"position {position.type!r} {what}, which attention {attention.type!r} has no place for; use an"
                " input-level position such as 'sinusoidal_absolute' or 'learned_absolute', or attention 'dense' or"
                " 'band_attention'."
            )
    if config.is_decoder and position.turns_by_length(attention.angles) and attention.keeps_rotated:
        raise ValueError(
            f"position {position.type!r} as it is set turns all keys anew as a text grows, but attention"
            f" {attention.type!r} as it is set generates from keys as they were turned; use another `scaling`, or"
            " attention 'dense'."
        )
    if position.needs_causal and not config.is_decoder:
        raise ValueError(
            f"position {position.type!r} only works in a causal decoder; give the encoder another position such as "
            "'learned_absolute'."
        )
    if config.unpad_inputs:
        refuse_unpadding(config)
    check_hand_overs(config, SLOTS)
    for slot in SLOTS:
        getattr(config, slot).check(config)


def _check_heads(slot: str, spec: Any, config: Any) -> None:
    """Refuses what attention cannot do to its queries, keys and scores."""
    if spec.query_key_norm != "none":
        norm = config.normalization
        if "norm" not in spec.head_options:
            raise ValueError(
                f"{slot} {spec.type!r} makes its queries and keys in a way of its own and cannot normalize them; leave"
                " `query_key_norm` at 'none', or use a mechanism such as 'dense'."
            )
        if norm.over_tokens or not norm.any_width:
            raise ValueError(
                f"`query_key_norm` of {slot} {spec.type!r} normalizes single heads, which normalization {norm.type!r}"
                " cannot; use 'rms_norm' or 'layer_norm', or leave `query_key_norm` at 'none'."
            )
        if spec.query_key_norm == "each_head" and not norm.knows_heads:
            raise ValueError(
                f"`query_key_norm` 'each_head' of {slot} {spec.type!r} asks for a gain for every head, which"
                f" normalization {norm.type!r} has not; use 'rms_norm' or 'layer_norm', or `query_key_norm` 'head'."
            )
    if spec.score_cap is not None:
        inside = config.position.acts & {"score_terms", "score_bias"}
        able = "cap" in spec.head_options
        if not able or (slot == "attention" and inside):
            what = f"position {config.position.type!r}" if able else f"{slot} {spec.type!r}"
            raise ValueError(
                f"{what} has no place for `score_cap` {spec.score_cap}, which dense and windowed attention have with a"
                " position outside the scores; set it to None, or use these."
            )
    if spec.output_gate != "none" and "parts" not in spec.head_options:
        raise ValueError(
            f"{slot} {spec.type!r} does not hand out what its heads read one by one, as `output_gate`"
            f" {spec.output_gate!r} needs; leave it at 'none', or use a mechanism such as 'dense' or 'sliding_window'."
        )
    inside = config.position.acts & {"score_terms", "score_bias"}
    able = "sink" in spec.head_options
    if spec.learned_sinks and (not able or (slot == "attention" and inside)):
        what = f"position {config.position.type!r}" if able else f"{slot} {spec.type!r}"
        raise ValueError(
            f"{what} has no place for `learned_sinks`, which dense and windowed attention have with a position outside"
            " the scores; leave them off, or use these."
        )
    for part in (*spec.losses, spec.aggregation):
        if part is not None:
            part.check(spec, slot, config)


def why_no_packing(layers: list) -> str | None:
    """Why packed rows would let documents read one another in the layers of a tower (their configs); None where they
    do not. It names the component that cannot keep them apart."""
    for layer in layers:
        for slot in ("stack", "block", "attention"):
            spec = getattr(layer, slot)
            if "packed_rows" not in spec.supports:
                return (
                    f"`position_ids` restart inside a row (packed documents), which {slot} {spec.type!r} cannot keep"
                    " apart; give one document per row, or an `attention_mask` to say that rows are not packed."
                )
    return None


def check_shared(layers: list) -> None:
    """Refuses layers of one tower that do not fit each other: what they share has one owner and one size.

    layers: the configs of all distinct layers, from the first one on.

    Raises:
        ValueError: names what is shared and what differs.
    """
    position = layers[0].position
    sizes = [position.shared_sizes(layer) for layer in layers]
    for index, found in enumerate(sizes):
        if found != sizes[0]:
            raise ValueError(
                f"position {position.type!r} has the same tables for all layers, whose heads therefore have to be"
                f" alike, but layer {index} has {layers[index].num_attention_heads} of width"
                f" {layers[index].head_width} and layer 0 {layers[0].num_attention_heads} of width"
                f" {layers[0].head_width}; give all layers the same heads."
            )
    decodes_memory = layers[0].is_decoder and layers[0].is_encoder_decoder
    for slot in ("attention", "cross_attention") if decodes_memory else ("attention",):
        _check_chain(slot, layers)


def _check_chain(slot: str, layers: list) -> None:
    specs = [getattr(layer, slot) for layer in layers]
    for index, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        carry = spec.carries(layer)
        if carry is None:
            continue
        lost = carry.handed_on and layer.stack.shares != "all"
        for holder, loses in ((layer.stack, lost), (layer.block, not layer.block.passes_states)):
            if loses:
                raise ValueError(
                    f"{slot} {spec.type!r} as it is set hands tensors from layer to layer, which {holder.slot}"
                    f" {holder.type!r} cannot pass on; use another mechanism, e.g. 'dense', or the stack 'plain' and"
                    " the block 'vanilla'."
                )
        if carry.of_first and layer.stack.shares == "nothing":
            raise ValueError(
                f"{slot} {spec.type!r} as it is set has parts in layer 0 that all layers read, and stack"
                f" {layer.stack.type!r} runs its layers apart; use another mechanism, e.g. 'dense', or the stack"
                " 'plain'."
            )
        owner = 0 if carry.of_first or carry.owner is None or len(layers) == 1 else carry.owner(index)
        same = specs[owner].type == spec.type and specs[owner].carries(layers[owner]) is not None
        if (carry.of_first or carry.owner is not None) and not same:
            raise ValueError(
                f"{slot} {spec.type!r} of layer {index} reads what layer {owner} owns, which has"
                f" {specs[owner].type!r} as it is set; give layer {owner} {spec.type!r} with the same fields, or layer"
                f" {index} another mechanism."
            )
        if carry.throughout and any(other.type != spec.type for other in specs):
            others = ", ".join(sorted({repr(other.type) for other in specs if other.type != spec.type}))
            raise ValueError(
                f"{slot} {spec.type!r} carries a memory through all layers of a tower, of which some have {others};"
                f" give all layers {spec.type!r}, or none."
            )
        for other, (wider, kept) in enumerate(zip(layers, specs, strict=True)):
            other_carry = kept.carries(wider) if kept.type == spec.type else None
            if other_carry is not None and other_carry.sizes != carry.sizes:
                raise ValueError(
                    f"{slot} {spec.type!r} shares tensors between layers, so their sizes have to be alike, but layer"
                    f" {index} has {carry.sizes} and layer {other} {other_carry.sizes}; leave those out of"
                    " `per_layer_config`."
                )


def refuse_unpadding(config: Any) -> None:
    """Refuses `unpad_inputs` for components that mix tokens outside attention.

    Raises:
        ValueError: names the component and says why.
    """
    for slot in ("stack", "block"):
        spec = getattr(config, slot)
        if "unpadding" not in spec.supports:
            raise ValueError(
                f"`unpad_inputs=True` joins the real tokens of a batch into one row between attentions, which {slot} "
                f"{spec.type!r} does not allow: {spec.why_not.get('unpadding', '')}; leave `unpad_inputs` out."
            )


__all__ = [
    "SLOTS",
    "Slot",
    "Spec",
    "SpecLike",
    "preset",
    "aliased",
    "bounded",
    "check_layers",
    "build_spec",
    "canonical_fields",
    "check_components",
    "check_shared",
    "did_you_mean",
    "field_aliases",
    "names",
    "record_lookups",
    "refuse_unpadding",
    "register",
    "resolve_field_types",
    "why_no_packing",
]
