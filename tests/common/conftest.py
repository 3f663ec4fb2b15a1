"""Skips what a class says that it cannot do."""

import pytest

from hf_xformers.variants import config_class


@pytest.fixture(autouse=True)
def contract_exceptions(request):
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec is not None else None
    test, reason = request.function.__name__.removeprefix("test_"), None
    if case is not None:
        reason = case.exception(test)
    elif callspec is not None and {"name", "head"} <= callspec.params.keys():
        holder = config_class(callspec.params["name"])
        reason = getattr(holder, "contract_exceptions", {}).get(f"{test}:{callspec.params['head']}")
    if reason is not None:
        pytest.skip(reason)
