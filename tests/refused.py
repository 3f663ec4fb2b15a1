"""What tests of refusals share: of configs, and of commands."""

import pytest
from transformers import AutoConfig

from hf_xformers.cli import main


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


def refused(capsys, *argv) -> str:
    """The message of a command that must be refused: one line, the last of what it says."""
    capsys.readouterr()
    assert main(list(map(str, argv))) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "hf-xformers: error:" in line]
    assert len(lines) == 1 and "Traceback" not in error, error
    message = lines[0].partition("error: ")[2]
    assert error.rstrip().endswith(message), error
    return message
