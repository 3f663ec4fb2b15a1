"""The embedded corpus: what is in it, that it is the same every time, and how it is divided."""

import hashlib
import json
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from hf_xformers.data import stdlib_corpus, stdlib_documents
from hf_xformers.data.stdlib_corpus import _without_repeats

FINGERPRINT = """
import hashlib, sys
import hf_xformers
before = set(sys.modules)
import hf_xformers.data
heavy = {"datasets", "tokenizers", "transformers"} & (set(sys.modules) - before)
documents = hf_xformers.data.stdlib_documents()
side_effects = {"antigravity", "this", "turtle", "tkinter", "idlelib"} & set(sys.modules)
text = "\\0".join(part for document in documents for part in document)
print(hashlib.sha256(text.encode()).hexdigest(), sorted(heavy), sorted(side_effects))
"""


@pytest.fixture(scope="module")
def documents():
    return {document.name: document.text for document in stdlib_documents()}


def test_size_and_names(documents):
    assert len(documents) == len(stdlib_documents()) > 400
    assert 1.5e6 < sum(map(len, documents.values())) < 6e6
    assert {"json", "json.decoder", "argparse", "builtins", "topics/assert"} <= set(documents)
    assert not [name for name in documents if {"test", "tests", "idle_test"} & set(name.split("."))]
    assert list(documents) == sorted(documents, key=lambda name: (name.startswith("topics/"), name))
    assert all(text == text.strip() and text for text in documents.values())


def test_holds_what_the_interpreter_shows(documents):
    """Against `inspect.getdoc` and the topics themselves, by import, for texts that occur nowhere else."""
    import inspect
    from pydoc_data.topics import topics

    for function in (textwrap.wrap, textwrap.dedent, json.JSONEncoder.iterencode):
        module = "textwrap" if function.__module__ == "textwrap" else "json.encoder"
        assert inspect.getdoc(function) in documents[module]
    assert inspect.cleandoc(str.partition.__doc__) in documents["builtins"]
    assert topics["assert"].strip() in documents["topics/assert"]


def test_same_in_another_process_and_without_importing_modules(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FINGERPRINT], cwd=root, capture_output=True, text=True, check=True)
    text = "\0".join(part for document in stdlib_documents() for part in document)
    assert done.stdout.split("\n")[0] == f"{hashlib.sha256(text.encode()).hexdigest()} [] []"


def test_no_passage_twice(documents):
    seen = {}
    for name, text in documents.items():
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) >= 60:
                assert words not in seen, (name, seen.get(words), words)
                seen[words] = name
    assert len(seen) > 5000


def test_repeats_are_dropped_by_passage():
    seen = set()
    long = "A paragraph that is long enough to count as a passage of its own, certainly."
    assert _without_repeats("Return True.", seen) == "Return True."
    assert _without_repeats("Return\n  True.", seen) == ""
    assert _without_repeats(f"First.\n\n{long}\n\nReturn True.", seen) == f"First.\n\n{long}\n\nReturn True."
    assert _without_repeats(f"Second.\n\n  {long}", seen) == "Second."
    assert _without_repeats("  \n ", seen) == ""


@pytest.fixture
def fake_library(tmp_path, monkeypatch):
    """A standard library of three modules, without compiled modules and topics."""
    package = tmp_path / "pack"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text('"""Package."""\nraise SystemExit("imported")\n')
    (package / "tests" / "__init__.py").write_text('"""Fixtures."""\n')
    (package / "broken.py").write_text("def f(:\n")
    (package / "latin.py").write_bytes('# -*- coding: latin-1 -*-\n"""Caf\xe9."""\n'.encode("latin-1"))
    (tmp_path / "single.py").write_text(
        textwrap.dedent('''
            """Module."""
            try:
                class A:
                    "Class."
                    def f(self):
                        """Method.

                            Indented.

                        Last.
                        """
                        def g(): "Inner."
            except ImportError:
                async def h(): "Coroutine."
            else:
                if 0 and "\\d":
                    def k(): "Branch."
            match 1:
                case 1:
                    def m(): "Case."
            def n(): return "no docstring"
            def o(): "Method."
            ''')
    )
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset({"pack", "single", "absent"}))
    monkeypatch.setattr(sys, "builtin_module_names", ())
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # makes the import fail
    return tmp_path


def test_reading_order_and_what_is_passed_over(fake_library):
    assert [tuple(document) for document in stdlib_documents.__wrapped__()] == [
        ("pack", "Package."),
        ("pack.latin", "Café."),
        (
            "single",
            (
                "Module.\n\nClass.\n\nMethod.\n\n   "
                " Indented.\n\nLast.\n\nInner.\n\nCoroutine.\n\nBranch.\n\nCase.\n\nMethod."
            ),
        ),
    ]


def test_builtin_modules_leave_out_what_tools_add(fake_library, monkeypatch):
    import builtins

    def intruder():
        """Added by a shell."""

    monkeypatch.setattr(sys, "builtin_module_names", ("builtins",))
    monkeypatch.setattr(builtins, "intruder", intruder, raising=False)
    text = stdlib_documents.__wrapped__()[0].text
    assert "Added by a shell." not in text
    assert "Return the absolute value of the argument." in text


def test_without_sources_the_error_says_what_to_do(fake_library):
    for path in [*fake_library.rglob("*.py")]:
        path.unlink()
    with pytest.raises(ValueError, match=r"no standard library sources.*give a text file"):
        stdlib_documents.__wrapped__()


def test_split_follows_the_hash_of_the_name():
    splits = stdlib_corpus()
    sides = {name: side for side, part in splits.items() for name in part["name"]}
    assert list(splits) == ["train", "validation"]
    assert sum(part.num_rows for part in splits.values()) == len(sides) == len(stdlib_documents())
    for name, side in sides.items():
        digest = hashlib.blake2b(name.encode(), digest_size=8, key=b"0").digest()
        assert (side == "validation") == (int.from_bytes(digest, "big") / 2**64 < 0.05), name
    characters = {side: sum(map(len, part["text"])) for side, part in splits.items()}
    assert 0.025 < characters["validation"] / sum(characters.values()) < 0.1
    more = set(stdlib_corpus(0.1)["validation"]["name"])
    assert set(splits["validation"]["name"]) < more


def test_split_settings():
    assert list(stdlib_corpus(0)) == ["train"]
    for fraction in (-0.1, 1.0, 1e-9):
        with pytest.raises(ValueError, match="validation_fraction="):
            stdlib_corpus(fraction)
