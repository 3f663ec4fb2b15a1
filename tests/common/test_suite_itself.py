"""The suite's own rules: what it covers, and that no exception is a typo."""

import ast
from pathlib import Path

from hf_xformers.core.components import SLOTS, names
from hf_xformers.variants import config_class, family, model_types
from tests.common.cases import ALL, CASES, SHAPES

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
    """An exception that names no test excuses nothing; one without a reason is none."""
    holders = [config_class(name) for name in model_types()]
    holders += [SLOTS[slot].get(name) for slot in SLOTS for name in names(slot)]
    for holder in holders:
        for key, reason in getattr(holder, "contract_exceptions", {}).items():
            test, _, shape = key.partition(":")
            assert test in TESTS, f"{holder.__name__}: no test is called {test!r}"
            assert shape in ("", *ALL, *getattr(holder, "heads", ())), (
                f"{holder.__name__}: no shape or head is called {shape!r}"
            )
            assert len(reason) > 10, f"{holder.__name__}: say why {test!r} cannot pass"
