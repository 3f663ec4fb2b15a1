"""Links of the written pages work in the checkout, and lead to the same things on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs.indexes import indexes
from scripts.docs.links import CODE, LINK, for_site
from tests.documents import ROOT

STARTS = ("README.md", "CONTRIBUTING.md", "model_cards/README.md", "benchmarks/results/README.md")
WRITTEN = [*STARTS, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", WRITTEN)
def test_links_work_in_the_checkout(name):
    page = ROOT / name
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = page.parent / file
        assert target.exists(), link
        if target.suffix == ".md" and anchor:
            assert anchor in anchors(target), link
        if target.suffix == ".py" and anchor:  # a component, whose section the site has
            assert f'"{anchor}"' in target.read_text(encoding="utf-8"), link


def test_links_of_the_site():
    text = (
        "[a](../../model_cards/xf_luna.md#cost), [b](../../benchmarks/results/README.md), [c](serve.md#padding),"
        " [d](../../hf_xformers/attention/hedgehog.py#hedgehog), [e](../../hf_xformers/conversion/__init__.py),"
        " [f](../notebooks/mix_components.ipynb), [g](../../SECURITY.md), [h](#here), [i](https://example.org/a.md)\n\n"
        "```text\n[j](../../model_cards/xf_luna.md)\n```\n"
    )
    assert re.findall(r"\]\((.*?)\)", for_site(text, "guides/swap.md")) == [
        *("../zoo/luna.md#cost", "../results/index.md", "serve.md#padding"),
        *("../zoo/components/attention.md#hedgehog", "../api/conversion.md", "../notebooks/mix_components.md"),
        *("https://github.com/hf-xformers/hf_xformers/blob/main/SECURITY.md", "#here", "https://example.org/a.md"),
        "../../model_cards/xf_luna.md",
    ]


@pytest.mark.parametrize("path, text", indexes().items())
def test_start_pages_are_current(path, text):
    assert (ROOT / path).read_text(encoding="utf-8") == text, "stale: run `python -m scripts.docs.figures`"
