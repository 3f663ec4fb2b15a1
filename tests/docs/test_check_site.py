"""The reader of a built site finds dead links, missing anchors and what other hosts would have to give."""

from __future__ import annotations

import pytest

from scripts.docs.check_site import main, problems


@pytest.fixture
def site(tmp_path):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "index.html").write_text('<a href="zoo/luna.html#use">x</a> <a href="https://arxiv.org/">x</a>')
    (tmp_path / "zoo" / "luna.html").write_text('<h2 id="use">x</h2> <a class="a" href="../index.html">x</a>')
    return tmp_path


def test_a_sound_site_passes(site, capsys):
    assert main(str(site)) == 0
    assert "2 pages, 0 problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("markup", "found"),
    [
        ('<a href="zoo/linformer.html">', "leads nowhere"),
        ('<a href="zoo/luna.html#cost">', "has no such anchor"),
        ('<img alt="map" src="maps/x.svg">', "leads nowhere"),
        ('<script src="https://cdn.example/x.js">', "from another host"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "from another host"),
    ],
)
def test_what_is_wrong_is_found(site, markup, found, capsys):
    (site / "index.html").write_text(markup)
    assert len(problems(site)) == 1 and found in problems(site)[0]
    assert main(str(site)) == 1
    capsys.readouterr()


def test_styles_that_load_from_elsewhere_are_found(site):
    (site / "site.css").write_text("@import url(https://fonts.example/x);")
    assert problems(site) == ["site.css: loads from another host"]
