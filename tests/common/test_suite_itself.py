"""The suite's own rules: what it covers, and that no exception is a typo."""

import ast
from pathlib import Path

import pytest

from hf_xformers.variants import config_class, family, model_types
from tests.common.cases import ALL, CASES, SHAPES
from tests.common.exceptions import EXCEPTIONS, exception, holders

TESTS = {
    node.name.removeprefix("test_")
    for path in Path(__file__).parent.glob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}


def test_every_variant_is_covered():
    """In every shape that its heads offer."""
    for name in model_types():
        shapes = {case.shape for case in CASES if case.config_class is config_class(name)}
        assert shapes == {shape for shape in ALL if SHAPES[shape] in family(name)}, name


def test_exceptions_name_tests():
    """An exception that names no test, shape or head excuses nothing; one without a reason is none."""
    for holder, entries in EXCEPTIONS.items():
        for key, reason in entries.items():
            test, _, shape = key.partition(":")
            heads = family(holder) if holder in model_types() else ()
            assert test in TESTS, f"{holder}: no test is called {test!r}"
            assert shape in ("", *ALL, *heads), f"{holder}: no shape or head is called {shape!r}"
            assert len(reason) > 10, f"{holder}: say why {test!r} cannot pass"


def test_exceptions_excuse_something():
    """Each belongs to a component or family that a case has, in a shape in which it is tested."""
    shapes: dict[str, set[str]] = {}
    for case in CASES:
        for holder in holders(case.config()):
            shapes.setdefault(holder, set()).add(case.shape)
    for holder, entries in EXCEPTIONS.items():
        assert holder in shapes, f"{holder!r} is no component or family of any case; take it out"
        for key in entries:
            shape = key.partition(":")[2]
            assert shape not in ALL or shape in shapes[holder], f"{holder} is not tested as {shape}; take {key!r} out"


@pytest.mark.parametrize(
    "names, keys, found",
    [
        (["xf_bert", "stack:funnel"], ("hidden_states", "hidden_states:encoder"), "stack:funnel: states inside"),
        (["stack:axial_transformer"], ("attention_weights:decoder",), "stack:axial_transformer: outer rows"),
        (["stack:axial_transformer"], ("attention_weights", "attention_weights:encoder"), None),
    ],
)
def test_exceptions_are_found(names, keys, found):
    reason = exception(names, *keys)
    assert reason is None if found is None else reason.startswith(found)
