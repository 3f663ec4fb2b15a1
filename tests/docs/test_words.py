"""The checker of words: what counts as prose, and that it finds what it is for."""

from pathlib import Path

import pytest

from scripts import words

PYTHON = '''"""A colour in a docstring."""
colour = {"centre": f"the {colour} of --colours"}  # its neighbour, `labelled`
BIBTEX = """@article{x, title={Modelling}}"""
'''
MARKDOWN = "# Grey\n\n```python\ncolour = 1\n```\n\nSee `colour` and [this](colours.md#grey).\n"


@pytest.mark.parametrize(
    ("name", "text", "seen", "hidden"),
    [
        ("a.py", PYTHON, ["A colour in", "its neighbour"], ["centre", "colours", "colour =", "labelled", "Modelling"]),
        ("a.md", MARKDOWN, ["Grey", "this"], ["colour", "colours", "#grey"]),
    ],
)
def test_prose_is_what_readers_see_in_words(tmp_path: Path, name, text, seen, hidden):
    (tmp_path / name).write_text(text)
    found = words.prose(tmp_path / name)
    assert len(found) == len(text) and found.count("\n") == text.count("\n")
    assert all(part in found for part in seen) and not any(part in found for part in hidden)


def test_it_finds_spelling_words_and_constructions(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("codespell_lib", reason="the extra dev has codespell")
    (tmp_path / "a.md").write_text("Its colour.\nIt heeds this.\nWhat goes on.\nFine.\n")
    (tmp_path / "scripts" / "docs").mkdir(parents=True)
    (tmp_path / "scripts" / "docs" / "words.txt").write_text("heeds->respects\n")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "PLACES", ("a.md",))
    monkeypatch.setattr(words, "AVOIDED", {r"\bgoes on\b": "continues"})
    assert words.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "a.md:3: goes on ==> continues",
        "a.md:1: colour ==> color",
        "a.md:2: heeds ==> respects",
        "3 problems in 1 files",
    ]
