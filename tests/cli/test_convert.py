import json

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, CamembertConfig, CamembertForMaskedLM

from hf_xformers.cli import main


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def logits(folder):
    with torch.no_grad():
        return AutoModelForMaskedLM.from_pretrained(folder).eval()(input_ids=torch.arange(5, 15)[None]).logits


def test_families_that_share_a_variant(tmp_path, capsys):
    """A model goes back to the family that it came from, or to the one that is asked for."""
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    CamembertForMaskedLM(CamembertConfig(**sizes)).save_pretrained(tmp_path / "theirs")

    def made(target, *more):
        source = "theirs" if target == "ours" else "ours"
        argv = ["convert", "--from", str(tmp_path / source), "--to", str(tmp_path / target), *more]
        return main(argv)

    def model_type(folder):
        return json.loads((tmp_path / folder / "config.json").read_text())["model_type"]

    assert made("ours") == made("back") == made("other", "--model-type", "xlm-roberta") == 0
    assert [model_type(folder) for folder in ("ours", "back", "other")] == ["xf_roberta", "camembert", "xlm-roberta"]
    torch.testing.assert_close(logits(tmp_path / "other"), logits(tmp_path / "theirs"), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert made("wrong", "--model-type", "bert") == 2
    assert "it converts to: camembert, roberta, xlm-roberta" in " ".join(capsys.readouterr().err.split())


def test_there_and_back(bert, tmp_path, capsys):
    assert main(["convert", "--from", str(bert), "--to", str(tmp_path / "ours")]) == 0
    out = capsys.readouterr().out
    assert "XFBertForMaskedLM" in out and "tensors mapped" in out
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "xf_bert"
    torch.testing.assert_close(logits(tmp_path / "ours"), logits(bert), rtol=1e-5, atol=1e-5)
    assert main(["convert", "--from", str(tmp_path / "ours"), "--to", str(tmp_path / "back"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["new"] == report["dropped"] == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "bert"
    torch.testing.assert_close(logits(tmp_path / "back"), logits(bert), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("option", "value"), [("--text", "sample.txt"), ("--seed", "3")])
def test_what_only_a_swap_reads(option, value, bert, tmp_path, capsys):
    assert main(["convert", "--from", str(bert), "--to", str(tmp_path / "ours"), option, value]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{option} is" in told and "give components to swap, or leave it out" in told
    assert not (tmp_path / "ours").exists()
