"""What `scripts/test.sh` prints, and the tests of a first look, seen on a suite of six tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import pytest

@pytest.mark.parametrize("n", [0, 1, 2])
def test_numbers(n): assert n != 1
def test_two(): pytest.skip("no such thing here")
def test_three(): pytest.skip("no such thing here")
@pytest.mark.slow
def test_slow(): pass
"""
OUTCOMES = """\
3 passed, 1 failed, 2 skipped
  FAILED tests/test_some.py::test_numbers[1] (call): assert 1 != 1
  2 skipped: no such thing here
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest over the suite, below the conftest of this one."""
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "reporting.py"):
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "tests" / "test_some.py").write_text(SUITE)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    def start(*words):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return start


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one process", "two"])
def test_a_run_says_how_far_it_is_and_ends_with_a_summary(run, tmp_path, words):
    done = run("--progress", str(tmp_path / "end"), *words)
    assert done.returncode == 1
    assert "FAILED tests/test_some.py::test_numbers[1] (call): assert 1 != 1\n" in done.stdout
    assert re.search(r"^ *\d+%  \d of 6, [01] failed, \d\.\d min, about \d\.\d more$", done.stdout, re.MULTILINE)
    assert not re.search(r"^[.Fs]+ ", done.stdout, re.MULTILINE)
    said = (tmp_path / "end").read_text()
    assert said.startswith(OUTCOMES)
    assert re.search(r"^\d\.\d minutes; .*\n  \d\.\d min  tests/test_some.py\n$", said.removeprefix(OUTCOMES))


def test_a_first_look_takes_one_case_of_two_functions(run, tmp_path):
    (tmp_path / "tests" / "test_other.py").write_text(SUITE)
    done = run("--quick", "--collect-only")
    found = re.findall(r"^tests/test_(\S+)", done.stdout, re.MULTILINE)
    assert done.returncode == 0
    assert found == [f"{file}.py::{name}" for name in ("test_numbers[0]", "test_two") for file in ("other", "some")]


def test_a_first_look_ends_in_time(run, tmp_path):
    path = tmp_path / "tests" / "reporting.py"
    path.write_text(path.read_text().replace("QUICK, SECONDS = 2, 90", "QUICK, SECONDS = 2, 0"))
    done = run("--quick", "--progress", str(tmp_path / "end"))
    assert done.returncode == 0
    assert (
        (tmp_path / "end").read_text().startswith("0 passed, 0 failed, 2 skipped\n  2 skipped: a first look takes 0")
    )


def test_a_file_that_cannot_be_read_is_a_failure(run, tmp_path):
    (tmp_path / "tests" / "test_some.py").write_text("import nothing_of_that_name\n")
    assert run("--progress", str(tmp_path / "end")).returncode == 2
    error = "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert f"  FAILED tests/test_some.py (collection): {error}\n" in (tmp_path / "end").read_text()


def test_tests_that_fail_with_their_fixture_are_one_line(run, tmp_path):
    fixture = '@pytest.fixture(scope="module", autouse=True)\ndef broken(): raise OSError("no\\nroom")\n'
    (tmp_path / "tests" / "test_some.py").write_text(SUITE.replace("import pytest\n", f"import pytest\n{fixture}"))
    assert run("--progress", str(tmp_path / "end")).returncode == 1
    said = (tmp_path / "end").read_text()
    assert said.startswith("0 passed, 6 failed, 0 skipped\n  FAILED tests/test_some.py::test_numbers[0] (setup)")
    assert "test_numbers[0] (setup) and 5 more of this file: OSError: no\n" in said and "room" not in said
