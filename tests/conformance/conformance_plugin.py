"""pytest plugin of scripts/conformance.py: one verdict a test, with its subtests folded in, written as JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tests.conftest import pytest_collection_finish  # noqa: F401  the garbage collector passes over what stays

# Marks of transformers' tests, which their own pytest configuration would declare.
_MARKS = (
    "all_flash_attn_test export_test flash_attn_3_test flash_attn_4_test flash_attn_test generate is_training_test "
    "order torch_compile_test torch_export_test"
).split()

RESULTS: dict[str, dict[str, Any]] = {}


def pytest_configure(config):
    for mark in _MARKS:
        config.addinivalue_line("markers", f"{mark}: used by transformers' common tests")


def spare_override_dicts() -> None:
    """transformers' tests raise every norm's epsilon, also on `config.decoder`, which they take for a config; here it
    may be a dict of overrides, which has nothing to raise."""
    from transformers import testing_utils

    raise_epsilons = testing_utils.set_config_for_less_flaky_test

    def spared(model_config):
        overrides = getattr(model_config, "decoder", None)
        if not isinstance(overrides, dict):
            return raise_epsilons(model_config)
        model_config.decoder = None
        raise_epsilons(model_config)
        model_config.decoder = overrides

    testing_utils.set_config_for_less_flaky_test = spared


def pytest_runtest_logreport(report):
    entry = RESULTS.setdefault(report.nodeid, {"outcome": None, "seconds": 0.0, "errors": [], "subtests": []})
    entry["seconds"] += getattr(report, "duration", 0.0) or 0.0
    subtest = getattr(report, "context", None)  # subtests report first, each for itself, and then the whole test does
    if subtest is not None:
        entry["subtests"].append(report.outcome)
    if report.outcome == "failed":
        entry["outcome"] = "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        entry["errors"].append(
            {
                "message": first_line(report),
                "where": f"{crash.path}:{crash.lineno}" if crash is not None else "",
                "subtest": str(subtest.msg or dict(subtest.kwargs) or "") if subtest is not None else "",
                "text": str(report.longrepr)[-6000:],
            }
        )
        return
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        entry["reason"] = str(reason)[:300]
    if subtest is None and entry["outcome"] is None:
        if report.outcome == "skipped":
            entry["outcome"] = "skipped"
        elif report.when == "call":  # a test whose subtests were all skipped has shown nothing
            entry["outcome"] = "skipped" if set(entry["subtests"]) == {"skipped"} else "passed"


def first_line(report) -> str:
    """The line that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    if crash is None:  # a bare traceback ends with it
        errors = [line for line in lines if re.match(r"(E\s+)?[\w.]*(Error|Exception|Exit|Failed)\b", line)]
        return (errors or lines)[-1][:400]
    if re.fullmatch(r"[\w.]+:?", lines[0]):  # only the name of the exception
        return " ".join(lines[:2])[:400]
    return lines[0][:400]


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):  # under xdist the controller writes, not its workers
        Path(os.environ["HF_XFORMERS_CONFORMANCE_RESULTS"]).write_text(json.dumps(RESULTS))
