"""The suite's own rules: what it covers, and that no exception is a typo."""

import ast
from pathlib import Path

import pytest

from hf_xformers.families import HEADS
from hf_xformers.variants import config_class, family, model_types
from tests.common.cases import ALL, CASES, COMPONENTS, PARTS, SHAPES, TESTED_HEADS
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
    """Each belongs to a component or family that is tested, in the shape or with the head that it names."""
    for holder, entries in EXCEPTIONS.items():
        for key in entries:
            test, _, where = key.partition(":")
            if where in HEADS:
                assert (holder, where) in TESTED_HEADS, f"{holder} is not tested with {where}; take {key!r} out"
                continue
            cases = CASES if test in ("tying", "resizing") else [*PARTS, *COMPONENTS]
            found = [case for case in cases if holder in holders(case.preset) and where in ("", case.shape)]
            assert found, f"no case that has {holder!r} meets {key!r}; take it out"


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
