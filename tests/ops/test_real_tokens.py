"""Where the real tokens of padded rows are, against loops over rows."""

import re
from itertools import product
from pathlib import Path

import torch

from hf_xformers.ops.common import real_tokens

MASK = torch.tensor(list(product([False, True], repeat=4)))  # every row of four tokens, of padding alone, too


def slots(row: list[bool], real: bool = True) -> list[int]:
    return [index for index, value in enumerate(row) if value is real]


def test_every_function_on_every_row():
    found = {name: getattr(real_tokens, name)(MASK) for name in real_tokens.__all__}
    for index, row in enumerate(MASK.tolist()):
        own = slots(row)
        first, last = (own[0], own[-1]) if own else (4, -1)
        expected = {
            "first_real": first if own else 0,
            "last_real": max(last, 0),
            "is_first_real": [slot == first for slot in range(4)],
            "from_first_real": [slot >= first for slot in range(4)],
            "up_to_last_real": [slot <= last for slot in range(4)],
            "real_first": own + slots(row, False),
            "real_last": slots(row, False) + own,
            "real_together": [slot for slot in range(4) if slot < first]
            + own
            + [slot for slot in slots(row, False) if slot > first],
            "places_behind": [max(slot - max(last, 0), 0) for slot in range(4)],
            "real_places": [max(sum(row[: slot + 1]) - 1, 0) for slot in range(4)],
        }
        assert {name: values[index].tolist() for name, values in found.items()} == expected


def test_the_order_leads_back():
    states = torch.randn(16, 4)
    order = real_tokens.real_first(MASK)
    assert torch.equal(states.gather(1, order).gather(1, order.argsort(1)), states)


def test_nowhere_else():
    """The package finds real tokens by these functions alone."""
    copies = (
        r"cumsum\(-?1\) (?:== 1|> 0)",
        r"mask\w*(?:\.long\(\))?\.cumsum\(-1\) - 1",
        r"argsort\(\(?~",
        r"\(~\w+\)(?:\.\w+\([\w.]*\))?\.argsort",
        r"(?:real|mask|padding)\w*\.(?:int|long)\(\)(?:\.flip\(1\))?\.argmax",
    )
    package = Path(real_tokens.__file__).parents[2]
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path != Path(real_tokens.__file__)
        for line in path.read_text().split("\n")
        if any(re.search(copy, line) for copy in copies)
    ]
    assert not found
