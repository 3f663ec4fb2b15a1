# SPDX-License-Identifier: Apache-2.0
"""What is compared: variants with changed components or fields, their shapes, and dense attention to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..training.building import build_config, grown_positions, objective_of_shape

if TYPE_CHECKING:
    from ..configuration_xformer import XFormerConfig


@dataclass(frozen=True)
class Shape:
    """head: the class that a model of this shape is. baseline: the variant with dense attention that it is compared
    with."""

    head: str
    baseline: str


SHAPES = {
    "encoder": Shape("ForMaskedLM", "xf_bert"),
    "decoder": Shape("ForCausalLM", "xf_gpt2"),
    "seq2seq": Shape("ForSeq2SeqLM", "xf_t5"),
}


@dataclass(frozen=True)
class Entry:
    """One thing to compare: a variant (model type) under a label, with components and configuration fields of its
    own."""

    label: str
    variant: str
    components: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config_class(self) -> Any:
        from ..variants import config_class

        return config_class(self.variant)

    def shapes(self) -> list[str]:
        """The shapes that the variant's family covers."""
        return [name for name, shape in SHAPES.items() if shape.head in self.config_class.heads]

    def __str__(self) -> str:
        """Variant and changes, as the command line has them."""
        parts = {**{slot: {**fields} for slot, fields in self.components.items()}, **self.fields}
        said = [f"{name} {value.pop('type', '')} {value or ''}" if isinstance(value, dict) else f"{name} {value}"
                for name, value in parts.items()]  # fmt: skip
        return ", ".join([self.variant, *(" ".join(one.split()) for one in said)])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def baseline(shape: str) -> Entry:
    """Dense attention in a shape."""
    return Entry("dense", SHAPES[shape].baseline)


def dense_twin(entry: Entry, shape: str, length: int) -> Entry:
    """The entry with dense attention in place of its own, all else alike: what its mechanism is compared with in
    quality. The entry itself if it is dense already; the [`baseline`] if its other parts refuse dense attention."""
    dense = {"attention": {"type": "dense"}}
    fields = dict(entry.fields)
    own = make_config(entry, shape, length)
    if _is_dense(own):
        return entry
    if own.decoder and "attention" in own.decoder:
        fields["decoder"] = {**fields.get("decoder", {}), **dense}
    if "per_layer_config" in fields:
        layers = fields["per_layer_config"].items()
        fields["per_layer_config"] = {index: {**changes, **dense} for index, changes in layers}
    twin = Entry(f"dense ({entry.label})", entry.variant, {**entry.components, **dense}, fields)
    try:
        return twin if _is_dense(make_config(twin, shape, length)) else baseline(shape)
    except (TypeError, ValueError):
        return baseline(shape)


def _is_dense(config: XFormerConfig) -> bool:
    return all(layer.attention.type == "dense" for tower in config.tower_configs() for layer in tower.layer_configs())


def choose_shapes(
    entries: Sequence[Entry], wanted: str | None = None, order: Sequence[str] = tuple(SHAPES)
) -> dict[str, str]:
    """Label -> shape: `wanted`, or the first in `order` that all entries have, or each entry's own first.

    Raises:
        ValueError: an entry that reads images, or has no class of the wanted shape or of one in `order`.
    """
    able = {entry.label: entry.shapes() for entry in entries}
    for entry in entries:
        if entry.config_class.modality != "text":
            raise ValueError(
                f"variant {entry.variant!r} reads {entry.config_class.modality}s; `hf-xformers benchmark` compares"
                " variants that read text"
            )
        if wanted is not None and wanted not in able[entry.label]:
            raise ValueError(
                f"variant {entry.variant!r} has no {wanted} class ({SHAPES[wanted].head}); it is made for "
                f"{' and '.join(able[entry.label])}: leave it out, or choose another shape"
            )
        if not set(able[entry.label] if wanted is None else [wanted]) & set(order):
            raise ValueError(
                f"a task is for models of the shape {' or '.join(order)}, and variant {entry.variant!r} would be"
                f" {wanted or ' or '.join(able[entry.label])}: leave one of them out"
            )
    common = [shape for shape in order if all(shape in shapes for shapes in able.values())]
    chosen = wanted or (common[0] if common else None)
    return {label: chosen or next(shape for shape in order if shape in shapes) for label, shapes in able.items()}


def make_config(entry: Entry, shape: str, length: int, size: str = "tiny", **fields: Any) -> XFormerConfig:
    """The configuration of an entry for rows of `length` tokens, without dropout: its variant at a size, then
    `fields`, then its own components and fields.

    Raises:
        ValueError: parts that do not fit together.
    """
    cls = entry.config_class
    known = {field.name for field in dataclasses.fields(cls)}
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    given = {name: 0.0 for name in rates if name in known} | {"max_position_embeddings": length} | fields
    given = {**given, **entry.fields}
    objective = objective_of_shape(shape)()

    def built() -> XFormerConfig:
        return build_config(cls, size, objective, components=entry.components, fields=given)

    config = built()
    if "max_position_embeddings" not in entry.fields:
        given |= grown_positions(config, length)
        config = built()
    return config
