# SPDX-License-Identifier: Apache-2.0
"""transformers' `rope_parameters` and our rotary position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..position.rotary import RotarySpec
from ..position.rotary_scaling import SCALINGS, RotaryScaling, build_scaling

_PLAIN = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rotation_fields(parameters: Mapping[str, Any] | None, *, partial: bool = False) -> dict[str, Any]:
    """`theta`, `scaling` and `fraction` of our rotary position for one set of their parameters. partial: the family
    reads `partial_rotary_factor`.

    Raises:
        ValueError: a type or a parameter that has no counterpart.
    """
    given = dict(parameters or {})
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta")
    if theta is None:
        raise ValueError(f"rope_parameters={parameters!r} has no `rope_theta`; give one for all layers of a kind.")
    fraction = given.get("partial_rotary_factor")
    fraction = 1.0 if fraction is None else fraction
    extra = {name: value for name, value in given.items() if name not in _PLAIN and value is not None}
    if kind == "proportional":
        extra["proportion"], fraction = fraction, 1.0
    elif fraction != 1.0 and not partial:
        raise ValueError(f"partial_rotary_factor={fraction!r} does not convert: this family rotates whole heads.")
    if kind == "default":
        if extra:
            raise ValueError(f"rope_parameters {extra!r} have no meaning for rope_type 'default'; leave them out.")
        return {"theta": theta, "scaling": None, "fraction": fraction}
    if kind not in SCALINGS:
        raise ValueError(f"rope_type={kind!r} does not convert; these do: default, {', '.join(SCALINGS)}.")
    known = {field.name for field in dataclasses.fields(SCALINGS.get(kind))}  # type: ignore[arg-type]
    unread = {"original_max_position_embeddings"} - known  # set with types that do not read it
    scaling = {"type": kind, **{name: value for name, value in extra.items() if name not in unread}}
    return {"theta": theta, "scaling": scaling, "fraction": fraction}


def rope_parameters(spec: RotarySpec, *, local: bool = False, partial: bool = False) -> dict[str, Any]:
    """The inverse of [`rotation_fields`] for the rotation of all layers, or of local ones."""
    theta = spec.local_theta if local and spec.local_theta is not None else spec.theta
    scaling = build_scaling(spec.local_scaling if local else spec.scaling)
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": "default" if scaling is None else scaling.type}
    if partial:
        found["partial_rotary_factor"] = spec.fraction
    if scaling is not None:
        found |= _said(scaling)
    return found


def _said(scaling: RotaryScaling) -> dict[str, Any]:
    """Fields that are not at their defaults, and what transformers wants in any case."""
    always = {"llama3": ("low_freq_factor", "high_freq_factor")}.get(scaling.type, ())
    found = {}
    for field in dataclasses.fields(scaling):  # type: ignore[arg-type]
        value = getattr(scaling, field.name)
        if value == field.default and field.name not in always:
            continue
        name = "partial_rotary_factor" if field.name == "proportion" else field.name
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def rotary_of(config: XFormerConfig, layout: str = "half") -> RotarySpec:
    """The rotary position of a config. layout: which channels their model pairs.

    Raises:
        ValueError: it has another position, or one that turns other channels.
    """
    spec = config.position
    if not isinstance(spec, RotarySpec) or spec.layout != layout or spec.values:
        raise ValueError(
            f"position {spec.to_dict()!r} has no counterpart in transformers: its model turns queries and keys by a"
            f" rotary position of layout {layout!r}."
        )
    return spec
