"""Cards of objectives: every one explains its settings and shows an example that its own collator made."""

import pytest

from hf_xformers.hub.objective_card import example, objective_card
from hf_xformers.objectives import OBJECTIVES


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective_has_a_card(name):
    card = objective_card(name)
    assert card.startswith(f"# Objective `{name}`") and "- needs: a" in card and "\nrow: " in card
    assert f"--objective {name}" in card


def test_the_example_is_corrupted():
    text = example("mlm")
    row, inputs, labels = (line.split(": ", 1)[1].split() for line in text.splitlines())
    assert len(row) == len(inputs) == len(labels) and "[MASK]" in inputs
    for word, read, label in zip(row, inputs, labels):
        assert label in ("·", word) and (read == word or label == word)
    assert text == example("mlm")


def test_settings_are_explained():
    for line in objective_card("struct_bert").splitlines():
        if line.startswith("| `"):
            assert len(line.split("|")[3].strip()) > 2, line
