#!/usr/bin/env python
"""Breaks the package in one place at a time, and lists the places that no test notices.

    python scripts/mutate.py --seed 0 --n 40 --paths hf_xformers/data --tests tests/data --json new
    python scripts/mutate.py --seed 0 --n 40 --paths hf_xformers/data --tests tests/data --json old --suite main
    python scripts/mutate.py --compare old new

Without --tests, each mutation meets what `scripts/affected.py` selects for its file, nearest first; tests marked slow
never run. --suite takes `tests/` as in another revision. The same --seed and --paths give the same mutations whatever
the tests; a larger --n only adds some.

What changes is in `scripts/mutations.py`, each category as often as the others. It changes in a temporary copy of the
repository; the working tree is never touched.

Outcomes: caught (by which test), survived, no import, and unfinished (more than --limit seconds); the last two do not
count. What fails is repeated without the change: a test that fails then too is left out from there on.

mutmut and cosmic-ray do not fit: the one puts every function behind a wrapper that takes `*args, **kwargs`, and
transformers reads signatures; the other edits the working tree, and leaves out neither statements nor arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, SURVIVED, NO_IMPORT, UNFINISHED = "caught", "survived", "no import", "unfinished"
QUIET = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--timeout=120"]
# Imports first, as tests that never meet the module would not tell; 99 is no exit code of pytest's.
RUN = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    print(repr(error)); sys.exit(99)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""

# A cached module counts as current while its source has the same size and second, which a changed constant may keep.
_FRESH = {"PYTHONDONTWRITEBYTECODE": "1"}


class Copy:
    """A copy of the repository that is changed and tested."""

    def __init__(self, folder: Path, suite: str | None):
        self.root, self.passed, self.left_out = folder, set(), []
        files = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        for name in subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
            if name and (ROOT / name).is_file() and not (suite and name.startswith("tests/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        if suite:
            archive = subprocess.run(["git", "archive", suite, "tests"], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)

    def pytest(self, module: str, words: list[str], limit: float) -> tuple[int | None, str]:
        """Exit code (None: unfinished) and the first failed test, or what was printed last."""
        command = [
            sys.executable,
            "-c",
            RUN,
            module,
            *QUIET,
            *(f"--deselect={test}" for test in self.left_out),
            *words,
        ]
        settings = dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        process = subprocess.Popen(
            command, cwd=self.root, env={**os.environ, "PYTHONPATH": str(self.root), **_FRESH, **settings}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # also what the tests started, and when this process is stopped
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: \(\w+\).*| - .*)?$", printed, re.MULTILINE)
        return process.returncode, failed[1] if failed else (printed.strip().splitlines() or [""])[-1]

    def try_out(self, mutation: Mutation, selections: list[list[str]], limit: float) -> None:
        """Fills the outcome in."""
        path = self.root / mutation.file
        before, began = path.read_bytes(), time.monotonic()
        module = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        while True:
            path.write_bytes(mutation.applied(before))
            for words in selections:
                code, test = self.pytest(module, words, limit)
                if code not in (0, 5):
                    break
            path.write_bytes(before)
            if code not in (1, 2, 3, 4) or test in self.passed:
                break
            # A failed test alone; of a file that could not be read, whether it can.
            if self.pytest(module, [test] if "::" in test else [test, "--collect-only"], limit)[0] == 0:
                self.passed.add(test)
                break
            if test in self.left_out:
                raise ValueError(f"pytest cannot run these tests on the unchanged package: {test}")
            self.left_out.append(test)
        named = {0: SURVIVED, 5: SURVIVED, 99: NO_IMPORT, None: UNFINISHED}
        mutation.outcome, mutation.seconds = named.get(code, CAUGHT), round(time.monotonic() - began, 1)
        mutation.test = test if code not in (0, 5, None) else ""


def selections_for(file: str) -> list[list[str]]:
    """What `scripts/affected.py` would run for this file, in one list of words for each call of pytest."""
    import affected

    plan = affected.make_plan([file])
    common = [affected.COMMON, "-k", affected.contract_expression(plan.families)] if plan.families else []
    return [words for words in (plan.files, common) if words]


def compare(old: str, new: str) -> str:
    """What two runs of the same mutations say differently."""
    runs = [[Mutation(**one) for one in json.loads(Path(path).read_text())["mutations"]] for path in (old, new)]
    if [(one.file, one.start, one.diff) for one in runs[0]] != [(one.file, one.start, one.diff) for one in runs[1]]:
        raise ValueError(f"{old} and {new} hold different mutations; run both with the same --seed, --n and --paths.")
    differing = [
        f"{one} -> {other.outcome} {other.test}\n{one.diff}"
        for one, other in zip(*runs)
        if one.outcome != other.outcome
    ]
    return "\n".join([*differing, *(f"{path}: {counts(run)}" for path, run in zip((old, new), runs))])


def counts(done: list[Mutation]) -> str:
    outcomes = [one.outcome for one in done]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in (CAUGHT, SURVIVED, NO_IMPORT, UNFINISHED))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=40, help="how many mutations (40)")
    parser.add_argument("--paths", nargs="+", default=["hf_xformers"], help="files and folders to change")
    parser.add_argument("--tests", nargs="+", help="files and folders to test with, and further words for pytest")
    parser.add_argument("--suite", metavar="REVISION", help="tests/ as it is there, in place of the working tree's")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one mutation (900)")
    parser.add_argument("--json", metavar="FILE", help="write all outcomes here, after each mutation")
    parser.add_argument("--list", action="store_true", help="only show the mutations")
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="two files that --json wrote")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: the copy goes, and what runs in it
    try:
        if options.compare:
            print(compare(*options.compare))
            return 0
        chosen = mutations(ROOT, options.paths, options.seed, options.n)
        if options.list:
            print("\n".join(f"{one}\n{one.diff}" for one in chosen))
            return 0
        with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
            copy = Copy(Path(folder), options.suite)
            for number, mutation in enumerate(chosen, 1):
                selections = [options.tests] if options.tests else selections_for(mutation.file)
                copy.try_out(mutation, selections, options.limit)
                print(f"{number}/{len(chosen)} {mutation} ({mutation.seconds} s)", flush=True)
                if options.json:
                    record = {**vars(options), "mutations": [asdict(one) for one in chosen[:number]]}
                    Path(options.json).write_text(json.dumps(record, indent=1))
        if copy.left_out:
            print("left out, as they fail on the unchanged package:", *copy.left_out)
        print(*(f"{one}\n{one.diff}" for one in chosen if one.outcome == SURVIVED), counts(chosen), sep="\n")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
