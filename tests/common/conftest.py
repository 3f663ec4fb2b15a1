"""Skips what a class says that it cannot do."""

import pytest


@pytest.fixture(autouse=True)
def contract_exceptions(request):
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec is not None else None
    if case is not None:
        reason = case.exception(request.function.__name__.removeprefix("test_"))
        if reason is not None:
            pytest.skip(reason)
