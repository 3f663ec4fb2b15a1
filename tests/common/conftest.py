"""Skips what `exceptions.py` excuses."""

import pytest

from tests.common.exceptions import exception


@pytest.fixture(autouse=True)
def excused(request):
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec is not None else None
    test, reason = request.function.__name__.removeprefix("test_"), None
    if case is not None:
        reason = case.exception(test)
    elif callspec is not None and {"name", "head"} <= callspec.params.keys():
        reason = exception([callspec.params["name"]], f"{test}:{callspec.params['head']}")
    if reason is not None:
        pytest.skip(reason)
