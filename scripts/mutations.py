"""What one change of a Python file can be, for `scripts/mutate.py`: a list of places, drawn by a seed.

Operators, comparisons, numbers and booleans, arguments (one left out, two swapped), statements (left out) and branches
(the other one). Texts, annotations, decorators and the defaults of settings stay. Positions come from `ast`; a change
is an edit of the text there, so that the rest of a file stays as it is.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    outcome: str = "planned"
    test: str = ""
    seconds: float = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.category}: {self.outcome} {self.test}".rstrip()

    def applied(self, before: bytes) -> bytes:
        return before[: self.start] + self.text.encode() + before[self.end :]


class Places:
    """found: every mutation of one file."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, []
        self.lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        self.visit(ast.parse(source), None)

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
            self.add(category, start + match.start(), start + match.end(), table[found])

    def visit(self, node, scope) -> None:
        """scope: the function or class that a node is in, None outside."""
        for child in self.within(node, scope):
            self.visit(child, node if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else scope)

    def within(self, node, scope) -> Iterable[ast.AST]:
        """Adds the mutations of a node; returns its parts that may have more: no annotation, decorator or text."""
        match node:
            case (
                ast.JoinedStr()
                | ast.Assign(targets=[ast.Name(id="__all__")])
                | ast.If(test=ast.Name(id="TYPE_CHECKING"))
            ):
                return []
            case ast.ClassDef():
                return node.body
            case ast.FunctionDef(args=arguments):
                return [*arguments.defaults, *filter(None, arguments.kw_defaults), *node.body]
            case ast.Raise():
                self.replace("statement", node, "pass")
                return []
            case ast.Break() | ast.Continue():
                self.replace("statement", node, "pass")
            case ast.AnnAssign(value=value):
                setting = isinstance(scope, ast.ClassDef) and not isinstance(getattr(value, "value", None), bool)
                return [] if setting or value is None else [value]
            case ast.Assign(targets=[target], value=value):
                # Anything but a change of what is there already would be missed at once.
                again = isinstance(target, ast.Name) and re.search(rf"\b{target.id}\b", self.text(value))
                if scope and (again or isinstance(target, ast.Subscript)):
                    self.replace("statement", node, "pass")
                return [value]
            case ast.AugAssign(target=target, value=value):
                self.symbol("operator", OPERATORS, target, value)
                self.replace("statement", node, "pass")
                return [value]
            case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
                if name in TALK:
                    return []
                if scope:
                    self.replace("statement", node, "pass")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test, *_]):
                self.replace("branch", test, f"not ({self.text(test)})")
            case ast.BinOp(left=left, right=right):
                self.symbol("operator", OPERATORS, left, right)
            case ast.BoolOp(values=values):
                for pair in itertools.pairwise(values):
                    self.symbol("operator", OPERATORS, *pair)
            case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
                length = 3 if isinstance(node.op, ast.Not) else 1
                self.add("operator", self.start(node), self.start(node) + length, "")
            case ast.Compare(left=left, comparators=others):
                for pair in itertools.pairwise([left, *others]):
                    self.symbol("comparison", COMPARISONS, *pair)
            case ast.Constant(value=bool(value)):
                self.replace("constant", node, str(not value))
            case ast.Constant(value=int(value)):
                self.replace("constant", node, str(value + 1))
            case ast.Constant(value=float(value)):
                self.replace("constant", node, repr(value * 2 or 1.0))
            case ast.Call() if scope:
                self.arguments(node)
        return ast.iter_child_nodes(node)

    def arguments(self, node: ast.Call) -> None:
        swaps = () if getattr(node.func, "id", None) in ("min", "max") else node.args
        for first, second in itertools.pairwise(swaps):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                between = self.source[self.end(first) : self.start(second)].decode()
                swapped = self.text(second) + between + self.text(first)
                self.add("argument", self.start(first), self.end(second), swapped)
        for keyword, after in zip(node.keywords, [*node.keywords[1:], None]):
            if not isinstance(keyword.value, ast.JoinedStr) and " " not in str(getattr(keyword.value, "value", "")):
                self.add("argument", self.start(keyword), self.start(after) if after else self.end(node) - 1, "")


def mutations(root: Path, paths: list[str], seed: int, number: int) -> list[Mutation]:
    """`number` mutations of files under `paths`, of each category in turn."""
    places: dict[str, list[Mutation]] = {}
    for path in paths:
        if not (root / path).exists():
            raise ValueError(f"there is no {path} below {root}; --paths are files and folders of the package.")
        for file in sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]:
            for mutation in Places(str(file.relative_to(root)), file.read_bytes()).found:
                places.setdefault(mutation.category, []).append(mutation)
    for category, found in places.items():
        random.Random(f"{seed} {category}").shuffle(found)
    turns = itertools.zip_longest(*(places[category] for category in sorted(places)))
    return list(itertools.islice((one for turn in turns for one in turn if one and changes(root, one)), number))


def changes(root: Path, mutation: Mutation) -> bool:
    """Whether the outcome is Python and means something else; fills the diff in."""
    before = (root / mutation.file).read_bytes()
    after = mutation.applied(before)
    lines = difflib.unified_diff(before.decode().splitlines(), after.decode().splitlines(), lineterm="", n=0)
    mutation.diff = "\n".join(list(lines)[3:])
    try:
        return ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return False
