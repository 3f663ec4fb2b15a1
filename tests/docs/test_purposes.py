"""What each variant is for: all have sentences of their own, and cards and pages show them."""

from __future__ import annotations

import dataclasses

import pytest

from hf_xformers.hub.model_card import variant_card
from hf_xformers.hub.purposes import purposes
from hf_xformers.variants import model_types
from scripts.docs import zoo

NAMES = [model_type.removeprefix("xf_") for model_type in model_types()]


def test_every_variant_has_an_entry_and_no_other_name_has():
    assert set(purposes()) == set(NAMES)


def test_sentences_are_whole_and_say_something_of_their_own():
    for field in ("problem", "gives_up", "take_it_when"):
        found = [getattr(purpose, field) for purpose in purposes().values()]
        assert len(set(found)) == len(found), field
        assert all(text[0].isupper() and text.endswith(".") and 20 < len(text) < 330 for text in found), field


@pytest.mark.parametrize("name", NAMES)
def test_relatives_exist_and_are_others(name):
    relatives = purposes()[name].relatives
    assert 2 <= len(relatives) <= 4 and len(set(relatives)) == len(relatives)
    assert set(relatives) <= set(NAMES) - {name}


def test_performers_know_each_other():
    """Of two versions each page leads to the other."""
    assert "performer_v1" in purposes()["performer"].relatives and "performer" in purposes()["performer_v1"].relatives


@pytest.mark.parametrize("name", ["performer", "xformer"])
def test_cards_and_pages_show_them(name):
    card = variant_card(name if name == "xformer" else f"xf_{name}")
    page, purpose = zoo.variant(name), purposes()[name]
    assert purpose.symbols in card
    for field in dataclasses.fields(purpose):
        if field.name in ("problem", "gives_up"):
            assert getattr(purpose, field.name) in card and getattr(purpose, field.name) in page
    for relative in purpose.relatives:
        assert f"`xf_{relative}`" in card and f"({relative}.md)" in page
