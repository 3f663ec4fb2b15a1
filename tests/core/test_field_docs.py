"""What docstrings say of fields, in both of their forms."""

from dataclasses import dataclass

from hf_xformers.core.field_docs import meanings

PROSE = """A window of keys. size: keys on each side; 0: none. sinks,
dilation: of the first tokens, ...

Its heads are alike. heads: how many; few.
"""
ARGS = """A window of keys.

Args:
    size: keys on each side; 0: none.
    sinks, dilation: of the first tokens, ...
    heads (`int`, *optional*, defaults to `f(1)`): how
        many; few.

Its heads are alike.

    size: 3
"""


@dataclass
class Fields:
    size: int = 1
    sinks: int = 2
    dilation: int = 3
    heads: int = 4


def explained(text, bases=(Fields,)):
    return meanings(type("Explained", bases, {"__doc__": text}))


def test_both_forms_say_the_same():
    known = {"size": "keys on each side; 0: none", "heads": "how many; few"}
    known |= dict.fromkeys(["sinks", "dilation"], "of the first tokens, ...")
    assert explained(PROSE) == explained(ARGS) == known


def test_a_field_that_another_entry_mentions_is_not_its_end():
    text = "Args:\n    size: see heads. sinks: no entry.\n    dilation: gaps.\n\nRaises:\n    heads: no field."
    assert explained(text) == {"size": "see heads. sinks: no entry", "dilation": "gaps"}


def test_what_a_class_says_comes_before_its_bases():
    base = type("Base", (Fields,), {"__doc__": ARGS})
    found = explained("size: another.", (base,))
    assert found["size"] == "another" and found["heads"] == "how many; few"
