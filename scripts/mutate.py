#!/usr/bin/env python
"""Breaks the package in one place at a time, and lists the places that no test notices.

    python scripts/mutate.py --seed 0 --n 40 --paths hf_xformers/position --tests tests/position --json new
    python scripts/mutate.py --seed 0 --n 40 --paths hf_xformers/position --tests tests/position --json old --suite main
    python scripts/mutate.py --compare old new

Without --tests, each mutation meets what `scripts/affected.py` selects for its file, nearest first; tests marked slow
never run. --suite takes `tests/` as in another revision. The same --seed and --paths give the same mutations whatever
the tests; a larger --n only adds some.

What changes, each category as often as the others: operators, comparisons, numbers and booleans, arguments (one left
out, two swapped), statements (left out) and branches (the other one). Texts, annotations, decorators and the defaults
of settings stay. The change is made in a temporary copy of the repository, as an edit of the text at a position from
`ast`; the working tree is never touched.

Outcomes: caught (by which test), survived, no import, and unfinished (more than --limit seconds); the last two do not
count. What fails is repeated without the change: a test that fails then too is left out from there on.

mutmut and cosmic-ray do not fit: the one puts every function behind a wrapper that takes `*args, **kwargs`, and
transformers reads signatures; the other edits the working tree, and leaves out neither statements nor arguments.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, SURVIVED, NO_IMPORT, UNFINISHED = "caught", "survived", "no import", "unfinished"
OPERATORS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "@": "+", "&": "|", "|": "&", "^": "|",
    "<<": ">>", ">>": "<<", "and": "or", "or": "and",
}  # fmt: skip
COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in",
}  # fmt: skip
SYMBOL = re.compile(r"is\s+not\b|not\s+in\b|is\b|in\b|and\b|or\b|\*\*|//|<<|>>|[<>=!]=|[-+*/%@&|^<>]")
TALK = {"warn", "warning", "warning_once", "warning_advice", "info", "debug", "error", "print"}
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


@dataclass
class Mutation:
    """start, end: bytes of the file that `text` takes the place of."""

    file: str
    line: int
    category: str
    start: int
    end: int
    text: str
    diff: str = ""
    outcome: str = ""
    test: str = ""
    seconds: float = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.category}: {self.outcome or 'planned'} {self.test}".rstrip()


class Places(ast.NodeVisitor):
    """Every mutation of one file."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, []
        self.lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        self.inside: list[ast.AST] = []  # functions and classes around
        self.visit(ast.parse(source))

    def start(self, node) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def add(self, category: str, start: int, end: int, text: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        self.found.append(Mutation(self.file, line, category, start, end, text))

    def replace(self, category: str, node, text: str) -> None:
        self.add(category, self.start(node), self.end(node), text)

    def symbol(self, category: str, table: dict[str, str], left, right) -> None:
        """The operator between two nodes."""
        start = self.end(left)
        between = self.source[start : self.start(right)].decode()
        match = SYMBOL.search(between)
        if match and "#" not in between and (found := re.sub(r"\s+", " ", match[0])) in table:
            first = start + len(between[: match.start()].encode())
            self.add(category, first, first + len(match[0].encode()), table[found])

    # What stays: texts, annotations, decorators, defaults of settings.
    def visit_JoinedStr(self, node) -> None: ...

    def visit_Raise(self, node) -> None:
        self.replace("statement", node, "pass")

    def visit_AnnAssign(self, node) -> None:
        declares = self.inside and isinstance(self.inside[-1], ast.ClassDef)
        if node.value and (not declares or getattr(node.value, "value", None) in (True, False)):
            self.visit(node.value)

    def visit_ClassDef(self, node) -> None:
        self.inside.append(node)
        for child in node.body:
            self.visit(child)
        self.inside.pop()

    def visit_FunctionDef(self, node) -> None:
        self.inside.append(node)
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)
        self.inside.pop()

    # What changes.
    def visit_Assign(self, node) -> None:
        target = node.targets[0]
        if getattr(target, "id", None) == "__all__":
            return
        again = isinstance(target, ast.Name) and any(
            isinstance(child, ast.Name) and child.id == target.id for child in ast.walk(node.value)
        )
        if self.inside and (again or isinstance(target, ast.Subscript)):  # anything else is missed at once
            self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node) -> None:
        self.symbol("operator", OPERATORS, node.target, node.value)
        self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node) -> None:
        if isinstance(node.value, ast.Constant):
            return
        call = node.value.func if isinstance(node.value, ast.Call) else None
        if getattr(call, "attr", getattr(call, "id", None)) in TALK:
            return
        if self.inside and isinstance(node.value, ast.Call):
            self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_Continue(self, node) -> None:
        self.replace("statement", node, "pass")

    visit_Break = visit_Continue

    def visit_If(self, node) -> None:
        if getattr(node.test, "id", None) == "TYPE_CHECKING":
            return
        self.replace("branch", node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_comprehension(self, node) -> None:
        for test in node.ifs:
            self.replace("branch", test, f"not ({self.text(test)})")
        self.generic_visit(node)

    def visit_BinOp(self, node) -> None:
        self.symbol("operator", OPERATORS, node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node) -> None:
        for left, right in itertools.pairwise(node.values):
            self.symbol("operator", OPERATORS, left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node) -> None:
        if not isinstance(node.operand, ast.Constant):
            length = 3 if isinstance(node.op, ast.Not) else 1
            self.add("operator", self.start(node), self.start(node) + length, "")
        self.generic_visit(node)

    def visit_Compare(self, node) -> None:
        for left, right in itertools.pairwise([node.left, *node.comparators]):
            self.symbol("comparison", COMPARISONS, left, right)
        self.generic_visit(node)

    def visit_Constant(self, node) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace("constant", node, repr(node.value * 2 or 1.0))

    def visit_Call(self, node) -> None:
        if any(isinstance(around, ast.FunctionDef) for around in self.inside):
            swaps = () if getattr(node.func, "id", None) in ("min", "max", "isinstance") else node.args
            for first, second in itertools.pairwise(swaps):
                if not {type(first), type(second)} & {ast.Starred} and ast.dump(first) != ast.dump(second):
                    between = self.source[self.end(first) : self.start(second)].decode()
                    swapped = self.text(second) + between + self.text(first)
                    self.add("argument", self.start(first), self.end(second), swapped)
            for index, keyword in enumerate(node.keywords):
                if isinstance(keyword.value, ast.JoinedStr) or " " in str(getattr(keyword.value, "value", "")):
                    continue  # a text
                later = node.keywords[index + 1 :]
                self.add("argument", self.start(keyword), self.start(later[0]) if later else self.end(node) - 1, "")
        self.generic_visit(node)


def mutations(root: Path, paths: list[str], seed: int, number: int) -> list[Mutation]:
    """`number` mutations of files under `paths`, of each category in turn."""
    files: set[Path] = set()
    for path in paths:
        if not (root / path).exists():
            raise ValueError(f"there is no {path} below {root}; --paths are files and folders of the package.")
        files |= set((root / path).rglob("*.py")) if (root / path).is_dir() else {root / path}
    places: dict[str, list[Mutation]] = {}
    for file in sorted(files):
        for mutation in Places(str(file.relative_to(root)), file.read_bytes()).found:
            places.setdefault(mutation.category, []).append(mutation)
    for category, found in places.items():
        random.Random(f"{seed} {category}").shuffle(found)
    order = [place for turn in itertools.zip_longest(*(places[name] for name in sorted(places))) for place in turn]
    return list(itertools.islice(changed(root, filter(None, order)), number))


def changed(root: Path, places: Iterator[Mutation]) -> Iterator[Mutation]:
    """Those that are Python and mean something else, with their diffs."""
    for place in places:
        before = (root / place.file).read_bytes()
        after = before[: place.start] + place.text.encode() + before[place.end :]
        try:
            if ast.dump(ast.parse(after)) == ast.dump(ast.parse(before)):
                continue
        except SyntaxError:
            continue
        lines = difflib.unified_diff(before.decode().splitlines(), after.decode().splitlines(), lineterm="", n=0)
        place.diff = "\n".join(list(lines)[3:])
        yield place


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
        quiet = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--timeout=120"]
        command = [
            sys.executable,
            "-c",
            RUN,
            module,
            *quiet,
            *(f"--deselect={test}" for test in self.left_out),
            *words,
        ]
        settings = dict(PYTHONPATH=str(self.root), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        environment = {**os.environ, **settings, "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: \(\w+\)| - .*)?$", printed, re.MULTILINE)
        return process.returncode, failed[1] if failed else (printed.strip().splitlines() or [""])[-1]

    def try_out(self, mutation: Mutation, selections: list[list[str]], limit: float) -> None:
        """Fills the outcome in."""
        path = self.root / mutation.file
        before, began = path.read_bytes(), time.monotonic()
        module = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        while True:
            path.write_bytes(before[: mutation.start] + mutation.text.encode() + before[mutation.end :])
            try:
                code, test = self.first_failure(module, selections, limit)
            finally:
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

    def first_failure(self, module, selections, limit):
        code, test = 0, ""
        for words in selections:
            code, test = self.pytest(module, words, limit)
            if code not in (0, 5):
                break
        return code, test


def selections_for(file: str) -> list[list[str]]:
    """What `scripts/affected.py` would run for this file, in one list of words for each call of pytest."""
    import affected

    plan = affected.make_plan([file])
    common = [affected.COMMON, "-k", affected.contract_expression(plan.families)] if plan.families else []
    return [words for words in (plan.files, common) if words]


def summary(done: Iterable[Mutation]) -> str:
    """Counts, and the survivors with what changed."""
    done = list(done)
    counts = {name: sum(one.outcome == name for one in done) for name in (CAUGHT, SURVIVED, NO_IMPORT, UNFINISHED)}
    survivors = [f"{one}\n{one.diff}" for one in done if one.outcome == SURVIVED]
    return "\n".join([*survivors, ", ".join(f"{number} {name}" for name, number in counts.items())])


def compare(old: str, new: str) -> str:
    """What two runs of the same mutations say differently."""
    runs = [json.loads(Path(path).read_text()) for path in (old, new)]
    first, second = ({one["file"] + str(one["start"]) + one["diff"]: one for one in run["mutations"]} for run in runs)
    if first.keys() != second.keys():
        raise ValueError(f"{old} and {new} hold different mutations; run both with the same --seed, --n and --paths.")
    lines = []
    for key, one in first.items():
        other = second[key]["outcome"]
        if one["outcome"] != other:
            lines.append(f"{one['file']}:{one['line']} {one['outcome']} -> {other} ({one['test']})\n{one['diff']}")
    for path, run in zip((old, new), (first, second)):
        counted = [one["outcome"] for one in run.values() if one["outcome"] in (CAUGHT, SURVIVED)]
        lines.append(f"{path}: {counted.count(CAUGHT)} of {len(counted)} caught")
    return "\n".join(lines)


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
        print(summary(chosen))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
