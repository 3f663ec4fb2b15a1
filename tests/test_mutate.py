"""`scripts/mutate.py` changes a copy in one place, the same for the same seed, and says which tests noticed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '''\
"""A text, 3 < 4."""
from typing import Final
LIMIT: Final[int] = 7
__all__ = ["f"]
class Options:
    size: int = 5
    fast: bool = False
@decorated(9)
def f(x: int, y=2):
    """Another text."""
    if x < y and not x:  # 1 + 1
        raise ValueError("1" + f"{x + 1}")
    x = g(x, y, scale=0.5, text="two words")
    print("said" + 1)
    return [-x for z in x if z]
'''


@pytest.fixture(scope="module")
def mutate():
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    import mutate

    yield mutate
    sys.path[:] = before


def test_places(mutate):
    """All of them, and nothing in texts, annotations, decorators or defaults of settings."""
    from mutations import Places

    source = SOURCE.encode()
    found = [(one.category, source[one.start : one.end].decode(), one.text) for one in Places("a", source).found]
    assert sorted(found) == sorted(
        [
            ("constant", "7", "8"),
            ("constant", "False", "True"),
            ("constant", "2", "3"),
            ("branch", "x < y and not x", "not (x < y and not x)"),
            ("operator", "and", "or"),
            ("comparison", "<", "<="),
            ("operator", "not", ""),
            ("statement", 'raise ValueError("1" + f"{x + 1}")', "pass"),
            ("statement", 'x = g(x, y, scale=0.5, text="two words")', "pass"),
            ("argument", "x, y", "y, x"),
            ("argument", "scale=0.5, ", ""),
            ("constant", "0.5", "1.0"),
            ("operator", "-", ""),
            ("branch", "z", "not (z)"),
        ]
    )


def test_a_seed_means_the_same_mutations(mutate):
    few, more = (mutate.mutations(ROOT, ["hf_xformers/metrics"], 3, number) for number in (8, 20))
    assert more[:8] == few and len(more) == 20
    assert mutate.mutations(ROOT, ["hf_xformers/metrics"], 4, 8) != few
    assert {one.category for one in few} == {"argument", "branch", "comparison", "constant", "operator", "statement"}
    for one in more:
        before = (ROOT / one.file).read_bytes()
        assert ast.dump(ast.parse(one.applied(before))) != ast.dump(ast.parse(before)) and one.diff


def test_outcomes(mutate, tmp_path):
    """A test of one function catches what changes it, and nothing that changes another; one that fails anyway is left
    out; the repository stays as it is."""
    status = ["git", "status", "--porcelain", "hf_xformers"]
    before = subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout
    copy = mutate.Copy(tmp_path, None)
    (tmp_path / "tests" / "test_new.py").write_text(
        "from hf_xformers.metrics.squad import squad\n"
        "def test_always(): assert False\n"
        "def test_squad():\n"
        "    assert squad(['a b'], [['a b']]) == {'exact_match': 100.0, 'f1': 100.0}\n"
    )
    source = (ROOT / "hf_xformers/metrics/squad.py").read_bytes()
    found = mutate.mutations(ROOT, ["hf_xformers/metrics/squad.py"], 0, 100)
    hundred = next(one for one in found if source[one.start : one.end] == b"100.0")
    broken = mutate.Mutation(hundred.file, 1, "constant", 0, 0, "import nothing_of_that_name\n")
    other = mutate.mutations(ROOT, ["hf_xformers/metrics/extractive.py"], 0, 1)[0]
    for one in (hundred, broken, other):
        copy.try_out(one, [["tests/test_new.py"]], 100)
    assert [one.outcome for one in (hundred, broken, other)] == ["caught", "no import", "survived"]
    assert hundred.test == "tests/test_new.py::test_squad" and copy.left_out == ["tests/test_new.py::test_always"]
    assert subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout == before


def test_two_runs(mutate, tmp_path):
    paths = [str(tmp_path / name) for name in ("old", "new")]
    for path, outcome in zip(paths, ("caught", "survived")):
        one = dict(file="a.py", line=3, category="constant", start=1, end=2, text="4", diff="-3\n+4", outcome=outcome)
        Path(path).write_text(json.dumps({"mutations": [one]}))
    said = mutate.compare(*paths)
    assert said.startswith("a.py:3 constant: caught -> survived") and f"{paths[0]}: 1 caught, 0 survived" in said
    Path(paths[1]).write_text(json.dumps({"mutations": []}))
    with pytest.raises(ValueError, match="different mutations"):
        mutate.compare(*paths)
