"""Equations: LaTeX outside of code becomes MathML that Markdown leaves alone, and every variant's can be shown."""

from __future__ import annotations

import re
import unicodedata
import xml.etree.ElementTree as tree

import pytest

from scripts.docs import catalog

pytest.importorskip("latex2mathml", reason="equations need latex2mathml (the extra `docs`)")

from scripts.docs.equations import mathml, plain, split_lines, with_equations


def text_of(markup: str) -> str:
    return unicodedata.normalize("NFKC", "".join(tree.fromstring(markup).itertext()))  # script letters as plain ones


@pytest.mark.parametrize("name", sorted(catalog.variants()))
def test_every_variant_has_an_equation_that_can_be_shown(name):
    latex = plain(catalog.variants()[name].info.equation)
    for line in filter(None, split_lines(latex)):
        shown = text_of(mathml(line, block=True))
        assert shown.strip() and "\\" not in shown.replace("\\setminus", "")
        letters = set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", re.sub(r"\\[A-Za-z]+", " ", line)))
        assert letters <= set(shown), (line, shown)


def test_signs_that_markdown_reads_are_numbers():
    assert not set("*_`[]\\|#!") & set(re.sub(r"&#\d+;", "", re.sub(r"<[^>]*>", "", mathml(r"a_1 * [b] | c \| d"))))


def test_parts_become_lines():
    assert split_lines(r"a, \qquad \left( b \quad c \right), \quad {d \qquad e}") == [
        "a,",
        r"\left( b \quad c \right),",
        r"{d \qquad e}",
    ]


def test_code_stays():
    text = "Costs $x$ and `$x$`.\n\n```bash\necho $HOME $PATH\n```\n\n$$\nx^2\n$$\n\nIt is 5$ or 6$.\n"
    made = with_equations(text)
    assert "`$x$`" in made and "echo $HOME $PATH" in made and "5$ or 6$" in made
    assert made.count("<math") == 2 and '<div class="equation">' in made


def test_what_nothing_draws_is_an_error():
    with pytest.raises(ValueError, match="write it in"):
        mathml(r"\unheardof{x}")
