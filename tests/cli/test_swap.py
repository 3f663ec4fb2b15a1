"""`hf-xformers convert` with components: the swap, its report, and refusals that change nothing."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, T5Config, T5Model

from hf_xformers.cli import main


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(BertConfig(vocab_size=50, max_position_embeddings=20, **sizes)).save_pretrained(folder)
    return folder


def logits(folder):
    with torch.no_grad():
        return AutoModelForMaskedLM.from_pretrained(folder).eval()(input_ids=torch.arange(5, 15)[None]).logits


def test_swap(bert, tmp_path, capsys):
    argv = ["convert", "--from", bert, "--attention", "longformer", "--attention.window", "256"]
    argv += ["--max-length", "40", "--to", tmp_path / "out", "--report", tmp_path / "report.json"]
    assert main(list(map(str, argv))) == 0
    captured = capsys.readouterr()
    assert "tensors kept" in captured.out and "KL(before || after)" in captured.out
    assert "attention: dense -> longformer" in captured.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["movement"]["kl_max"] < 1e-5 and report["movement"]["text"] == "random tokens"
    assert report["new"] == report["dropped"] == [] and len(report["derived"]) == 1 + 2 * 6
    assert report["conversion"]["source"] == "BertForMaskedLM"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(bert), rtol=0, atol=1e-5)
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config
    assert (config.attention.attention_window, config.max_position_embeddings) == (256, 40)


def test_chosen_layers(bert, tmp_path, capsys):
    argv = ["convert", "--from", bert, "--attention", "longformer", "--attention.window", "256"]
    assert main(list(map(str, [*argv, "--attention.layers", "1", "--to", tmp_path / "out"]))) == 0
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config
    assert [config.layer(index).attention.type for index in range(2)] == ["dense", "longformer"]
    capsys.readouterr()
    assert main(list(map(str, [*argv, "--attention.layers", "1-2", "--to", tmp_path / "other"]))) == 2
    assert "Layers '1-2' do not exist: the model has 2" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()


def test_fields_of_the_component_that_is_there(bert, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    sample = tmp_path / "sample.txt"
    sample.write_text("nothing reads it: there is no tokenizer")
    argv = ["convert", "--from", bert, "--to", first, "--attention", "band_attention", "--num_key_value_heads", "1"]
    argv += ["--per-layer-config", '{"1": {"attention": "dense"}}', "--text", sample, "--json"]
    assert main(list(map(str, argv))) == 0
    assert len(json.loads(capsys.readouterr().out)["derived"]) == 2 * 4
    argv = ["convert", "--from", first, "--to", second, "--attention.window_size", "3", "--position", "rotary"]
    assert main(list(map(str, argv))) == 0
    config = AutoModel.from_pretrained(second).config
    assert config.layer(0).attention.window_size == 3 and config.layer(1).attention.type == "dense"
    assert config.layer(0).position.type == "rotary" and config.num_key_value_heads == 1


def test_decoder_of_two_towers(tmp_path):
    torch.manual_seed(0)
    T5Model(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, max_length=9)
    ).save_pretrained(tmp_path / "t5")
    argv = ["convert", "--from", tmp_path / "t5", "--to", tmp_path / "out", "--attention", "band_attention"]
    assert main(list(map(str, [*argv, "--decoder.attention", "dense", "--max-length", "64"]))) == 0
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.attention.type, config.attention.scale, config.attention.bias) == ("band_attention", 1.0, False)
    decoder = config.tower("decoder").attention
    assert (decoder.type, decoder.scale, decoder.bias) == ("dense", 1.0, False)


REFUSED = {
    "component": (["--attention", "longformr"], "Did you mean 'longformer'"),
    "field": (
        ["--attention", "longformer", "--attention.widow", "3"],
        "Did you mean 'window'? Its fields are: max_global_tokens, bias, ",
    ),
    "value": (["--attention", "longformer", "--attention.window", "wide"], "--attention.window: 'wide'"),
    "slot": (["--atention.window", "3"], "Did you mean --attention.window?"),
    "length": (["--max-length", "0"], "--max-length must be at least 1 token, got 0"),
    "direction": (["--max-length", "30", "--direction", "to_theirs"], "leave it out"),
    "decoder": (["--decoder.attention", "dense"], "does not have; leave it out"),
    "layers": (["--per-layer-config", '{"first": {}}'], "is keyed by layer"),
    "layers no json": (["--per-layer-config", "{"], "a mapping in JSON"),
    "text": (["--max-length", "30", "--text", "nowhere.txt"], "give a text file"),
    "text alone": (["--text", "nowhere.txt"], "sample for a swap"),
    "report": (["--max-length", "30", "--report", "no/where.json"], "give a file in one that exists"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, bert, tmp_path, capsys):
    options, message = REFUSED[name]
    assert main(["convert", "--from", str(bert), "--to", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_head_that_is_new(bert, tmp_path, capsys):
    """What the source lacks counts as new; a model of this package gets it and stays."""
    bare, ours = tmp_path / "bare", tmp_path / "ours"
    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(bare)
    window = ["--attention", "longformer", "--attention.window", "4"]
    argv = ["convert", "--from", bare, "--head", "ForMaskedLM", *window, "--to", tmp_path / "mlm"]
    assert main(list(map(str, argv))) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tensors new 5" in said and "states moved by" in said and "KL" not in said
    assert main(list(map(str, ["convert", "--from", bare, *window, "--to", ours]))) == 0
    capsys.readouterr()
    argv = ["convert", "--from", ours, "--head", "ForTextContrast", "--to", tmp_path / "contrast"]
    assert main(list(map(str, argv))) == 0
    assert "tensors new 2" in " ".join(capsys.readouterr().out.split())
    config = json.loads((tmp_path / "contrast" / "config.json").read_text())
    assert config["architectures"] == ["XFormerForTextContrast"] and config["attention"]["type"] == "longformer"
    plain, stays = tmp_path / "plain", tmp_path / "stays"
    assert main(list(map(str, ["convert", "--from", bare, "--to", plain]))) == 0
    argv = ["convert", "--from", plain, "--head", "ForMaskedLM", "--direction", "to_ours", "--to", stays]
    assert main(list(map(str, argv))) == 0
    assert json.loads((stays / "config.json").read_text())["architectures"] == ["XFBertForMaskedLM"]
