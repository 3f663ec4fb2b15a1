"""Bounds that fields declare: every one of them holds, for every spec of the package."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import typing

import pytest

import hf_xformers
from hf_xformers.core.bounds import Bounds, bounded, check_bounds, field_bounds
from hf_xformers.core.components import SLOTS
from hf_xformers.core.specs import TypedSpec, build_in, register_in


def registered(base: type = TypedSpec) -> list[type[TypedSpec]]:
    """All registered classes of the package below `base`."""
    below = [cls for child in base.__subclasses__() for cls in [child, *registered(child)]]
    return [
        cls for cls in dict.fromkeys(below) if "registry" in vars(cls) and cls.__module__.startswith("hf_xformers")
    ]


@pytest.fixture(scope="module")
def fields() -> list[tuple[type[TypedSpec], str]]:
    for module in pkgutil.walk_packages(hf_xformers.__path__, "hf_xformers."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [(cls, name) for cls in registered() for name in field_bounds(cls)]


def edges(cls: type, name: str, bounds: Bounds) -> tuple[list, list]:
    """Values of the field's type just inside and just outside of its bounds."""
    declared = next(field for field in dataclasses.fields(cls) if field.name == name)
    whole = "float" not in str(declared.type)
    inside, outside = [], []
    for edge, kept, away in (
        (bounds.least, True, -1),
        (bounds.above, False, -1),
        (bounds.most, True, 1),
        (bounds.below, False, 1),
    ):
        if edge is not None:
            nearer, further = ((edge + s if whole else math.nextafter(edge, s * math.inf)) for s in (-away, away))
            edge = edge if whole else float(edge)
            inside.append(edge if kept else nearer)
            outside.append(further if kept else edge)
    pair = typing.get_origin(declared.type) is tuple
    if pair or not {int, float} & {declared.type, *typing.get_args(declared.type)}:
        inside, outside = ([(value, value) for value in values] for values in (inside, outside))
    return inside, outside


def test_all_bounds_hold(fields):
    """What is just outside is refused by name, with the value; what is just inside passes, and the default does."""
    for cls, name in fields:
        inside, outside = edges(cls, name, field_bounds(cls)[name])
        assert outside, (cls, name)
        for value in outside:
            with pytest.raises(ValueError) as refusal:
                build_in(cls.registry, {"type": cls.type, name: value}, "x")
            said = str(refusal.value)
            assert said.startswith(f"{cls.type} needs `{name}` ") and said.endswith(f", got {value}."), said
        spec = object.__new__(cls)  # what is inside may still not fit other fields
        for field in dataclasses.fields(cls):
            object.__setattr__(spec, field.name, field.default)
        check_bounds(spec)
        for value in inside:
            object.__setattr__(spec, name, value)
            check_bounds(spec)


def test_all_rooms_are_walked(fields):
    assert len(fields) > 200
    slots = {cls.slot for cls, _ in fields if hasattr(cls, "slot")}
    assert slots >= set(SLOTS) - {"cross_attention", "residual"}, slots


@pytest.fixture
def spec_class():
    class Base(TypedSpec):
        again: int | None = bounded(2, least=1)

    class Tasted(Base):
        again: int | None = 3
        number: float | int = bounded(0.5, "n", above=0, most=1)
        sizes: int | str | tuple = bounded("auto", least=1)

    registry = type(SLOTS["block"])("tasting", room="blocks")
    return register_in(registry, Tasted, "tasted")


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"again": 0}, "tasted needs `again` >= 1, got 0."),  # declared anew, with another default
        ({"n": 0}, "tasted needs `number` in (0, 1], got 0."),
        ({"number": math.nan}, "tasted needs `number` in (0, 1], got nan."),
        ({"sizes": 0}, "tasted needs `sizes` >= 1, got 0."),
        ({"sizes": ()}, "tasted needs `sizes` >= 1, got ()."),
        ({"sizes": ((1, 2), (3, 0))}, "tasted needs `sizes` >= 1, got ((1, 2), (3, 0))."),
    ],
)
def test_refusals(spec_class, fields, complaint):
    with pytest.raises(ValueError) as refusal:
        build_in(spec_class.registry, {"type": "tasted", **fields}, "x")
    assert str(refusal.value) == complaint


def test_what_is_no_number_passes(spec_class):
    spec = build_in(spec_class.registry, {"type": "tasted", "again": None, "sizes": "auto", "n": 1}, "x")
    assert (spec.again, spec.sizes, spec.number) == (None, "auto", 1)
    assert build_in(spec_class.registry, {"type": "tasted", "sizes": ((1, 2), 3)}, "x").sizes == ((1, 2), 3)


@pytest.mark.parametrize(
    "bounds, said",
    [
        (Bounds(least=1), "`x` >= 1"),
        (Bounds(above=0), "`x` > 0"),
        (Bounds(most=2), "`x` <= 2"),
        (Bounds(below=0), "`x` < 0"),
        (Bounds(least=0, below=1), "`x` in [0, 1)"),
        (Bounds(above=0, most=1), "`x` in (0, 1]"),
    ],
)
def test_what_a_bound_demands(bounds, said):
    assert bounds.demand("x") == said
