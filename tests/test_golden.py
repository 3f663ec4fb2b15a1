"""`scripts/golden.py` sees that models compute the same as before, and says where they do not."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ONLY = ["--only", "xf_gpt2 For[CQ]*"]


@pytest.fixture(scope="module")
def golden():
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    import golden

    yield golden
    sys.path[:] = before


def test_a_moved_weight_is_noticed(golden, tmp_path, monkeypatch, capsys):
    file, folders = str(tmp_path / "record.gz"), ["--folders", str(tmp_path / "folders")]
    monkeypatch.setattr(golden, "quiet", lambda: None)  # which is for a process
    assert golden.main(["record", file, *ONLY, *folders]) == 0
    assert golden.main(["compare", file, *ONLY, *folders]) == 0
    assert "2 models are equal bit for bit" in capsys.readouterr().out

    def strong_but_for_a_bit(model):
        usual(model)
        weight = model.get_input_embeddings().weight.data[5]  # of a token that the texts have
        torch.nextafter(weight, torch.full_like(weight, torch.inf), out=weight)

    usual = golden.make_strong
    monkeypatch.setattr(golden, "make_strong", strong_but_for_a_bit)
    assert golden.main(["compare", file, *ONLY]) == 1
    said = capsys.readouterr().out
    for item in ("left.logits", "length 40.logits", "training.gradient.model.trunk.layers.0"):
        assert f"xf_gpt2 ForCausalLM: {item}" in said
    assert "weight." not in said and "config" not in said and "xf_gpt2 ForQuestionAnswering: left" in said


def test_what_goes_and_comes_is_told(golden):
    before, now = {"a": ["1", "float32 [2] 3"], "b": ["2", "x"]}, {"b": ["2", "y"], "c": ["3", "z"]}
    assert golden.differences(before, now) == ["a is gone: float32 [2] 3", "c is new: z"]
