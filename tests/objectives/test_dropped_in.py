"""A file with an objective in the room `objectives` is all that the commands need."""

from __future__ import annotations

import pytest

from hf_xformers.objectives import OBJECTIVES
from hf_xformers.training.building import SHAPES, language_objectives, objective_of_shape
from tests.forks import forks
from tests.training.runs import pretrain_flags, write_text

# Predict the middle token of every row; registered under another name than its file's, and with an alias.
FILE = '''
from typing import ClassVar

from hf_xformers.core.specs import aliased
from hf_xformers.objectives.base import Collator, Objective, register


class MiddleCollator(Collator):
    def collate(self, rows):
        batch = self.pad_inputs(rows)
        labels = batch["input_ids"].clone()
        middle = labels.shape[1] // 2
        labels[:, :middle], labels[:, middle + self.objective.middle_width :] = -100, -100
        batch["labels"] = labels
        batch["input_ids"] = batch["input_ids"].masked_fill(labels != -100, self.tokenizer.mask_token_id)
        return batch


@register("middle", aliases=("centre",))
class MiddleObjective(Objective):
    """Predict the tokens in the middle.

    middle_width: how many.
    """

    middle_width: int = aliased(1, "width")

    summary: ClassVar[str] = "the tokens in the middle of a row"
    head: ClassVar[str] = "MaskedLM"
    add_special_tokens: ClassVar[bool] = True
    needed_tokens = ("mask",)

    def collator(self, tokenizer, *, seed=0, pad_to_multiple_of=None, static=False):
        return MiddleCollator(self, tokenizer, seed=seed, pad_to_multiple_of=pad_to_multiple_of, static=static)
'''
USE = """
import json, sys
import hf_xformers.objectives as room
room.__path__.append(sys.argv[1])
from hf_xformers.cli import main

def printed(argv):
    import contextlib, io
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(argv)
    return code, out.getvalue()

assert "middle" in room.OBJECTIVES and room.OBJECTIVES["centre"] is room.OBJECTIVES["middle"]
out, flags = sys.argv[2], sys.argv[3:]
assert main(["pretrain", *flags]) == 0
summary = json.load(open(out + "/training_summary.json"))
assert summary["steps"] == 2 and summary["objective"] == {"type": "middle", "middle_width": 2}, summary
code, text = printed(["evaluate", "--model", out, "--data", flags[flags.index("--data") + 1], "--json"])
assert code == 0 and json.loads(text[text.index("{"):])["objective"] == {"type": "middle", "middle_width": 2}
code, text = printed(["list", "--objectives"])
assert code == 0 and "middle: the tokens in the middle of a row" in text and "middle_width=1" in text, text
try:
    main(["pretrain", "--help"])
except SystemExit:
    pass
print("pretrained")
"""


def test_a_file_in_the_room_is_an_objective(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "dropped.py").write_text(FILE, encoding="utf-8")
    options = {"variant": "bert", "objective": "centre", "objective.width": 2, "max_steps": 2}
    argv = pretrain_flags(write_text(tmp_path / "text.txt"), tmp_path / "out", **options)
    done = forks().run(USE, str(tmp_path / "room"), str(tmp_path / "out"), *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pretrained" in done.stdout
    assert "mlm, clm, span, or another one of `hf-xformers list --objectives`" in " ".join(done.stdout.split())


def test_every_shape_has_one_usual_objective():
    assert list(language_objectives())[:3] == ["mlm", "clm", "span"]
    assert [objective_of_shape(shape).type for shape in SHAPES] == ["mlm", "clm", "span"]
    preferred = [cls.shape for cls in OBJECTIVES.values() if cls.preferred]
    assert sorted(preferred) == sorted(SHAPES)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_objectives_say_what_they_are(name):
    cls = OBJECTIVES[name]
    assert cls.summary and cls.type == cls.id == name and cls.shape in SHAPES
