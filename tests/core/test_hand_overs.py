"""Hand-overs: each is declared, given and read by somebody."""

import pytest

from hf_xformers.core.components import SLOTS, build_spec
from hf_xformers.core.hand_overs import HAND_OVERS, HandOver


def names(slot, side, what):
    return [name for name in SLOTS[slot] if what in getattr(build_spec(slot, name), side)]


@pytest.mark.parametrize("what", HandOver, ids=str)
def test_somebody_gives_or_reads_it(what):
    sides = {side: [slot for slot in SLOTS if names(slot, side, what)] for side in ("gives", "reads")}
    assert any(sides.values()), "nobody does"


@pytest.mark.parametrize("what", HAND_OVERS, ids=str)
def test_each_has_both_sides(what):
    between = HAND_OVERS[what]
    assert names(between.giver, "gives", what) and names(between.reader, "reads", what)
    for slot in SLOTS:  # nobody else claims it
        assert slot == between.giver or not names(slot, "gives", what)
        assert slot in (between.reader, "cross_attention") or not names(slot, "reads", what)
