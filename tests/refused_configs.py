"""The test that lists of refused configs share."""

import pytest
from transformers import AutoConfig


def refusals(cases):
    """A test of each case: what the message has, the fields of a config (`variant`: of which), and the error if it is
    no ValueError."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[0])
    def test_refused(case):
        message, fields, *error = case
        variant = fields.get("variant", "xformer")
        with pytest.raises(*(error or [ValueError]), match=message):
            AutoConfig.for_model(variant, **{name: value for name, value in fields.items() if name != "variant"})

    return test_refused
