# SPDX-License-Identifier: Apache-2.0
"""An English corpus that every Python installation carries: the documentation inside the standard library.

The documents are the docstrings of the modules named in `sys.stdlib_module_names` and the help topics of
`pydoc_data.topics`. Python modules are parsed, never imported, so that no module runs code or prints; only the modules
compiled into the interpreter (`sys.builtin_module_names`), which have no source and no file to load, are asked for
their `__doc__` strings. The text depends on the Python version and platform, not on the run: same interpreter, same
corpus, in the same order.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .splitting import check_fraction, stable_fraction

if TYPE_CHECKING:
    from datasets import DatasetDict

STDLIB_CORPUS_ID = "stdlib"

# Test suites that ship inside a few packages are code about fixtures, not prose about the library.
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Where the statements nested in a statement are kept; expressions cannot hold a docstring.
_STATEMENT_FIELDS = ("body", "handlers", "cases", "orelse", "finalbody")
_DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLANK_LINES = re.compile(r"\n\s*\n")
# Characters from which a repeated paragraph is dropped: shorter ones ("Return True.") are the idiom of the genre.
_SHORTEST_PASSAGE = 60
# Keyed into the hash of a document's name, so that the choice of validation documents is fixed once and for all.
_SPLIT_SEED = 0


class StdlibDocument(NamedTuple):
    """`name` is a dotted module name or `"topics/<topic>"`, `text` its docstrings with blank lines between."""

    name: str
    text: str


@functools.lru_cache(maxsize=1)
def stdlib_documents() -> tuple[StdlibDocument, ...]:
    """The documents of the corpus in a fixed order: modules by name, then help topics by name.

    A docstring, or a paragraph of at least 60 characters in it, that occurs more than once (inherited, copied between
    modules, quoted by several topics) is kept only where it occurs first, so that no passage is in two documents. The
    result is kept in memory for the life of the process and written nowhere.

    Raises:
        ValueError: the interpreter ships neither standard library sources nor docstrings.
    """
    seen: set[str] = set()
    documents = []
    for name, docstrings in _named_docstrings():
        text = "\n\n".join(filter(None, (_without_repeats(docstring, seen) for docstring in docstrings)))
        if text:
            documents.append(StdlibDocument(name, text))
    if not documents:
        raise ValueError(
            f"the Python at {sys.executable!r} has no standard library sources under "
            f"{sysconfig.get_path('stdlib')!r}, so there is no {STDLIB_CORPUS_ID!r} corpus; give a text file instead"
        )
    return tuple(documents)


def stdlib_corpus(validation_fraction: float = 0.05) -> DatasetDict:
    """The corpus as a `datasets.DatasetDict` with splits `train` and `validation`, columns `name` and `text`.

    A document belongs to `validation` when a hash of its name, read as a number in [0, 1), is below
    `validation_fraction`. A document therefore keeps its side when others come and go with the Python version, and
    the share of characters is near the fraction, not equal to it. With `validation_fraction=0` there is only `train`.

    Raises:
        ValueError: `validation_fraction` is outside [0, 1), or so small or large that one side would be empty.
    """
    from datasets import Dataset, DatasetDict

    check_fraction(validation_fraction)
    sides: dict[str, list[StdlibDocument]] = {"train": [], "validation": []}
    for document in stdlib_documents():
        held_out = stable_fraction(document.name, _SPLIT_SEED) < validation_fraction
        sides["validation" if held_out else "train"].append(document)
    if validation_fraction == 0:
        del sides["validation"]
    for side, documents in sides.items():
        if not documents:
            raise ValueError(
                f"validation_fraction={validation_fraction} leaves no document for {side!r}; "
                "take a value between 0.01 and 0.99, or 0 for no validation split"
            )
    return DatasetDict(
        {
            side: Dataset.from_dict({"name": [d.name for d in documents], "text": [d.text for d in documents]})
            for side, documents in sides.items()
        }
    )


def _without_repeats(docstring: str, seen: set[str]) -> str:
    """`docstring` without what `seen` holds already; adds the rest to `seen`. Layout does not make a text new."""
    whole = " ".join(docstring.split())
    if not whole or whole in seen:
        return ""
    kept = []
    for paragraph in _BLANK_LINES.split(docstring.strip("\n")):
        words = " ".join(paragraph.split())
        if len(words) < _SHORTEST_PASSAGE:
            kept.append(paragraph)
        elif words not in seen:
            seen.add(words)
            kept.append(paragraph)
    seen.add(whole)
    return "\n\n".join(kept).strip()


def _named_docstrings() -> Iterator[tuple[str, list[str]]]:
    """(document name, docstrings in reading order) of every module and topic, in the corpus order."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: dict[str, Path] = {}
    for top in sys.stdlib_module_names:
        package = root / top
        if (package / "__init__.py").is_file():
            for path in package.rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                if not _TEST_FOLDERS.intersection(parts):
                    sources[".".join(parts).removesuffix(".__init__")] = path
        elif package.with_suffix(".py").is_file():
            sources[top] = package.with_suffix(".py")
    for name in sorted({*sources, *sys.builtin_module_names}):
        yield name, _source_docstrings(sources[name]) if name in sources else _builtin_docstrings(name)

    try:
        from pydoc_data.topics import topics
    except ImportError:  # a trimmed-down Python without help()
        return
    for topic in sorted(topics):
        yield f"topics/{topic}", [topics[topic]]


def _source_docstrings(path: Path) -> list[str]:
    """Docstrings of a source file in reading order; none when it does not parse under this Python (templates)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes, which only the compiler cares about
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    return list(_walk_docstrings(tree))


def _walk_docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _DOCUMENTED_NODES):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for field in _STATEMENT_FIELDS:
        for child in getattr(node, field, ()):
            yield from _walk_docstrings(child)


def _builtin_docstrings(name: str) -> list[str]:
    """Docstrings of a module compiled into the interpreter, members by name.

    Only the interpreter's own functions and types count: tools put further names into `builtins` and `sys`.
    """
    try:
        module = importlib.import_module(name)
    except ImportError:  # listed for this platform, but not importable on its own
        return []
    docstrings = [module.__doc__]
    for _, member in sorted(vars(module).items()):
        if isinstance(member, types.BuiltinFunctionType):
            docstrings.append(member.__doc__)
        elif inspect.isclass(member) and member.__module__ in (name, "builtins"):
            docstrings.append(vars(member).get("__doc__"))
            docstrings.extend(
                getattr(attribute, "__doc__", None)
                for _, attribute in sorted(vars(member).items())
                if inspect.isroutine(attribute) or inspect.isdatadescriptor(attribute)
            )
    return [inspect.cleandoc(docstring) for docstring in docstrings if isinstance(docstring, str)]
