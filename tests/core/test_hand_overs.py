"""Hand-overs: each is declared, given and read by somebody, and refused where one side is missing."""

import pytest

from hf_xformers import XFormerConfig
from hf_xformers.core.components import SLOTS
from hf_xformers.core.hand_overs import HAND_OVERS, HandOver

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def names(slot, side, what):
    return [name for name in SLOTS[slot] if what in getattr(SLOTS[slot].get(name), side)]


@pytest.mark.parametrize("what", HandOver, ids=str)
def test_each_has_both_sides(what):
    between = HAND_OVERS[what]
    assert names(between.giver, "gives", what) and names(between.reader, "reads", what)
    for slot in SLOTS:  # nobody else claims it
        assert slot == between.giver or not names(slot, "gives", what)
        assert slot in (between.reader, "cross_attention") or not names(slot, "reads", what)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"block": "hi_transformer"},
            "block 'hi_transformer' works on sentences, which stack 'plain' does not make; ",
        ),
        ({"stack": "hi_transformer"}, "levels, which block 'vanilla' does not; set `block='hi_transformer'`"),
        ({"stack": "hiersumm", "position": "none"}, "the other paragraphs, which block 'vanilla' has not; set"),
        ({"block": "hiersumm"}, "block 'hiersumm' works on paragraphs, which stack 'plain' does not make"),
        ({"block": "transformer_in_transformer"}, "reads pixels, which embedding 'token' does not give"),
        ({"block": "memformer"}, "reads the slots of a memory, which stack 'plain' does not give"),
        ({"stack": "memformer"}, "has a memory that block 'vanilla' does not read; use block 'memformer'"),
        ({"stack": "feedback", "is_decoder": True}, "makes memories that attention 'dense' does not read"),
        ({"attention": "feedback", "is_decoder": True}, "that only stack 'feedback' makes, not 'plain'"),
        ({"position": "etc_relative"}, "which stack 'plain' does not give; use stack='etc'"),
        ({"block": "hiersumm", "stack": "memformer"}, "block 'hiersumm' works on paragraphs, which stack 'memformer'"),
    ],
)
def test_one_side_alone(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**SIZES, **fields)
