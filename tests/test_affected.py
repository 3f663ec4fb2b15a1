"""`scripts/affected.py` finds the tests that a change can reach, and says what it leaves out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.cases import CASES, FAMILY_HEADS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def affected():
    pytest.importorskip("grimp", reason="the graph of imports needs grimp, which import-linter brings")
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    import affected

    yield affected
    sys.path[:] = before


@pytest.mark.parametrize(
    "path, file, families",
    [
        (
            "hf_xformers/attention/performer.py",
            "tests/attention/test_performer.py",
            {"xf_performer", "xf_performer_v1"},
        ),
        ("hf_xformers/variants/bert.py", None, {"xf_bert"}),
        (
            "hf_xformers/ops/bucketed/attention.py",
            "tests/ops/test_bucketed.py",
            {
                "xf_bp_transformer",
                "xf_clustered_attention",
                "xf_improved_clustered_attention",
                "xf_reformer",
                "xf_routing_transformer",
                "xf_sac",
            },
        ),
        ("hf_xformers/cli/pretrain.py", "tests/cli/test_arguments.py", set()),
        ("tests/hub/isolated.py", "tests/hub/test_bundle.py", set()),
        ("CONTRIBUTING.md", "tests/test_contributing.py", set()),
    ],
)
def test_what_a_file_reaches(affected, path, file, families):
    plan = affected.make_plan([path])
    assert set(plan.families) == families
    assert file is None or file in plan.files
    assert all((ROOT / name).is_file() for name in plan.files)


def test_the_core_gives_a_sample_and_says_so(affected):
    plan = affected.make_plan(["hf_xformers/core/components.py"])
    assert "tests/core/test_components.py" in plan.files
    assert len(plan.files) == affected.FILES and len(plan.families) == affected.FAMILIES
    assert min(plan.left_out) > 0
    found = re.search(r"left out, .*: (\d+) files, (\d+) families", plan.describe())
    assert found and tuple(map(int, found.groups())) == plan.left_out


def test_near_ones_come_first(affected):
    importers = {"a": {"b"}, "b": {"c", "a"}, "c": {"d"}}
    assert affected.distances(["a"], importers) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert affected.nearest({"x": 2, "y": 1, "z": 2}, 2, first=["z"]) == ["y", "z"]


def test_imports_of_a_test_file(affected, tmp_path):
    path = tmp_path / "test_x.py"
    path.write_text(
        "import hf_xformers\nfrom hf_xformers.core import cache as c\ndef f():\n    import tests.helpers\n"
    )
    assert affected.imported_names(path) == {"hf_xformers.core", "hf_xformers.core.cache", "tests.helpers"}


def test_the_contract_of_a_family_and_of_no_other(affected):
    """pytest looks for each part of the expression inside a test's name."""
    parts = affected.contract_expression(["xf_bert"]).split(" or ")
    names = [f"test_x[{case}]" for case in CASES] + [f"test_x[left-{case}]" for case in CASES]
    names += [f"test_x[{name}-{head}]" for name, head in FAMILY_HEADS]
    found = [name for name in names if any(part in name for part in parts)]
    assert found == [name for name in names if "xf_bert-" in name] and len(found) > 6


def test_changed_files(affected, tmp_path, monkeypatch):
    """What was committed since, what is not committed, and what git does not know."""
    monkeypatch.setattr(affected, "ROOT", tmp_path)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text("1")
    git("add", "-A")
    git("commit", "-qm", "first")
    (tmp_path / "one").write_text("2")
    git("commit", "-qam", "second")
    assert affected.starting_point() == "HEAD~" and affected.changed_files("HEAD~") == ["one"]
    (tmp_path / "two").write_text("2")
    (tmp_path / "new").write_text("1")
    assert affected.starting_point() == "HEAD" and affected.changed_files("HEAD") == ["new", "two"]
    git("switch", "-qc", "side")
    git("commit", "-qam", "third")
    assert affected.changed_files(affected.starting_point()) == ["new", "two"]
    with pytest.raises(ValueError, match="no-such"):
        affected.changed_files("no-such")


@pytest.mark.parametrize(
    "words, revision, for_pytest",
    [
        (["-n", "2"], None, ["-n", "2"]),
        (["HEAD~3", "-n", "2"], "HEAD~3", ["-n", "2"]),
        ([], None, []),
    ],
)
def test_words_for_pytest_are_no_revision(affected, monkeypatch, words, revision, for_pytest):
    compared, called = [], []
    monkeypatch.setattr(affected, "starting_point", lambda: None)
    monkeypatch.setattr(affected, "changed_files", lambda name: compared.append(name) or [])
    monkeypatch.setattr(affected, "make_plan", lambda changed: affected.Plan(["a.py"], [], (0, 0)))
    monkeypatch.setattr(affected.subprocess, "call", lambda command, cwd: called.append(command) or 0)
    assert affected.main(words) == 0
    assert compared == [revision] and called[0][-len(for_pytest) - 1 :] == [*for_pytest, "a.py"]
