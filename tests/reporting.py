"""What a run of the tests says while it runs and at its end, and the tests of a first look (`--quick`)."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

QUICK, SECONDS = 2, 90  # test functions of a file, and the time in which as many of them run as there is time for
EVERY = 0.05  # of the run, between two lines where no terminal shows a moving one


def first_look(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The first case of the first functions of each file, the first functions of all files first, beginning with those
    of the contract (tests/common), and the other tests."""
    kept, left_out, functions = [], [], {}
    for item in items:
        known = functions.setdefault(item.path, set())
        name = item.nodeid.partition("[")[0]
        if name in known or len(known) >= QUICK or item.get_closest_marker("slow"):
            left_out.append(item)
        else:
            known.add(name)
            kept.append(((len(known), item.path.parent.name != "common"), item))
    return [item for _, item in sorted(kept, key=lambda entry: entry[0])], left_out


def failure(report: pytest.TestReport | pytest.CollectReport, when: str) -> tuple[str, str]:
    """The name of a failed test with the step that failed, and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2].removeprefix("E   ")
    return f"{report.nodeid} ({when})", message.partition("\n")[0][:200]


class FirstLook:
    """Ends it in time."""

    def __init__(self):
        self.began = time.monotonic()

    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.began > SECONDS:
            pytest.skip(f"a first look takes {SECONDS} seconds")


class Failures:
    """Names a failed test at once: pytest does so at the end, which a run that is stopped never reaches."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line("FAILED {}: {}".format(*failure(report, report.when)), red=True)


class Progress:
    """How far a run is, in place of pytest's dots: one line that moves on a terminal, some lines elsewhere; names of
    failed tests as they come. The summary goes to `file`, for `scripts/test.sh` to end with."""

    def __init__(self, terminal, file: Path):
        self.terminal, self.file, self.began = terminal, file, time.monotonic()
        self.moves = terminal.isatty
        self.total = self.done = self.passed = self.shown = 0
        self.failed: dict[tuple[str, str], list[str]] = {}  # by file and error: a fixture fails with all its tests
        self.skipped: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.total = len(ids)

    def pytest_collection_finish(self, session):
        self.total = len(session.items) or self.total

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report, config):
        return (yield)[0], "", ""

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.skipped:
            self.skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        if report.failed:
            self.fail(report, report.when)
        self.passed += report.passed and report.when == "call"
        if report.when == "teardown":
            self.done += 1
            self.show(report.nodeid.partition("::")[0])

    @property
    def failures(self) -> int:
        return sum(map(len, self.failed.values()))

    def show(self, path: str) -> None:
        """Where it is time to: five times a second on a terminal."""
        passed, part = time.monotonic() - self.began, self.done / max(self.total, self.done)
        due, now = (0.2, passed) if self.moves else (EVERY, part)
        if now < self.shown + due:
            return
        self.shown = now
        line = f"{part:4.0%}  {self.done} of {self.total}, {self.failures} failed, {passed / 60:.1f} min"
        line += f", about {(passed / part - passed) / 60:.1f} more"
        if self.moves:
            self.terminal.rewrite(f"{line}  {path}"[: shutil.get_terminal_size().columns - 1], erase=True)
        else:
            self.terminal.write_line(line)

    def pytest_collectreport(self, report):
        if report.failed:
            self.fail(report, "collection")

    def fail(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        name, error = failure(report, when)
        self.failed.setdefault((report.nodeid.partition("::")[0], error), []).append(name)
        if self.moves:
            self.terminal.rewrite("", erase=True)
            self.terminal.write("\r")
        self.terminal.write_line(f"FAILED {name}: {error}", red=True)

    def pytest_unconfigure(self):
        self.file.write_text(self.summary())

    def summary(self) -> str:
        lines = [f"{self.passed} passed, {self.failures} failed, {sum(self.skipped.values())} skipped"]
        for (_, error), names in self.failed.items():
            others = f" and {len(names) - 1} more of this file" if len(names) > 1 else ""
            lines.append(f"  FAILED {names[0]}{others}: {error}")
        lines += [f"  {count} skipped: {reason}" for reason, count in self.skipped.most_common()]
        lines.append(
            f"{(time.monotonic() - self.began) / 60:.1f} minutes; the slowest files, of all processes together:"
        )
        lines += [f"  {seconds / 60:.1f} min  {path}" for path, seconds in self.seconds.most_common(3)]
        return "\n".join(lines) + "\n"
