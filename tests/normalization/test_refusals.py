"""What configs refuse of normalization, in one sentence: a line for each."""

import pytest
from transformers import AutoConfig

REFUSED = [
    # adanorm
    ("k", dict(normalization={"type": "adanorm", "k": 1.0})),
    ("k", dict(normalization={"type": "adanorm", "k": -0.1})),
    ("scale", dict(normalization={"type": "adanorm", "scale": 0})),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_refused(case):
    message, fields, *error = case
    variant = fields.get("variant", "xformer")
    with pytest.raises(*(error or [ValueError]), match=message):
        AutoConfig.for_model(variant, **{name: value for name, value in fields.items() if name != "variant"})
