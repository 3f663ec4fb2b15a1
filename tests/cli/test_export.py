"""`hf-xformers export`: the graph computes the saved model; what cannot be exported is refused, and nothing is
lost."""

import importlib.util
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from hf_xformers import export
from hf_xformers.cli import main
from hf_xformers.export.whole_text import TALKATIVE
from hf_xformers.variants import config_class, family
from tests.helpers import make_strong, pad, tiny_fields, tokens
from tests.refused import refused


def save(folder, variant="xf_bert", head="ForSequenceClassification", **fields):
    torch.manual_seed(0)
    cls = config_class(variant)
    model = make_strong(family(variant)[head](cls(**tiny_fields(cls, **fields)))).eval()
    model.save_pretrained(folder)
    return model


def test_parity(tmp_path, capsys):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = save(tmp_path / "model", num_labels=3)
    file = tmp_path / "to" / "make" / "model.onnx"
    output = str(file.parent)  # a folder, in which the name is the one that readers of graphs look for
    assert main(["export", "--model", str(tmp_path / "model"), "--output", output, "--opset", "18", "--check"]) == 0
    assert "XFBertForSequenceClassification" in capsys.readouterr().out
    assert [entry.version for entry in onnx.load(file).opset_import if not entry.domain] == [18]
    ids, mask = pad([tokens(3), tokens(7, seed=1), tokens(25, seed=2)], 25, "right", seed=3)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.arange(25).expand(3, 25) // 2 % 2}
    (found,) = onnxruntime.InferenceSession(str(file)).run(None, {name: each.numpy() for name, each in given.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(**given).logits, atol=1e-4, rtol=1e-4)
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]

    before = file.read_bytes()
    message = refused(capsys, "export", "--model", tmp_path / "model", "--output", file, "--tolerance", "1e-30")
    assert "the graph does not compute this model and is not written" in message
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("variant", "head", "shape"),
    [
        ("xf_gpt2", "ForCausalLM", "decoder"),
        ("xf_vision_transformer", "ForImageClassification", "encoder"),
        pytest.param("xf_t5", "ForSeq2SeqLM", "seq2seq", marks=pytest.mark.slow),
    ],
)
def test_decoders_and_images(variant, head, shape, tmp_path):
    """Inputs of other sizes than the sample's give the model's logits."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    cls = config_class(variant)
    small = {"num_hidden_layers": 1, "num_decoder_layers": 1} if shape == "seq2seq" else {"num_hidden_layers": 1}
    model = make_strong(family(variant)[head](cls(**{**tiny_fields(cls, shape), **small}))).eval()
    report = export.export_onnx(model, tmp_path / "model.onnx")
    assert report.dynamic and report.difference < 1e-4
    generator = torch.Generator().manual_seed(5)
    given = {
        "input_ids": torch.randint(5, 60, (3, 11), generator=generator),
        "attention_mask": torch.ones(3, 11).long(),
    }
    if shape == "seq2seq":
        given["decoder_input_ids"] = torch.randint(5, 60, (3, 7), generator=generator)
    if cls.modality == "image":
        given = {
            "pixel_values": torch.randn(3, 3, model.config.image_size, model.config.image_size, generator=generator)
        }
    assert report.inputs == tuple(given)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(**given).logits, atol=1e-4, rtol=1e-4)


def test_half_precision_and_heads_without_weights(tmp_path, capsys):
    """Weights are exported in float32, a pooler that was never trained is left out, and another head is refused."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = save(tmp_path / "model", head="ForMaskedLM", num_hidden_layers=1)
    model.bfloat16().save_pretrained(tmp_path / "model")
    command = ["export", "--model", tmp_path / "model", "--output", tmp_path / "model.onnx"]
    assert main([*map(str, command), "--head", "Model"]) == 0
    said = capsys.readouterr().out
    assert "float32 (saved as bfloat16)" in said and "pooler" not in said
    outputs = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).get_outputs()
    assert [output.name for output in outputs] == ["last_hidden_state"]
    message = refused(capsys, *command, "--head", "ForSequenceClassification")
    assert "no weights for --head ForSequenceClassification (classifier." in message


def test_nothing_is_said_beside_the_result(tmp_path, capfd, monkeypatch):
    """Where a graph depends on the text, as Reformer's buckets do, torch's loggers print it whole, several times."""
    pytest.importorskip("onnxscript")
    save(tmp_path / "model")

    def talk(*args, **options):
        for name in ("torch.fx.experimental.symbolic_shapes", "torch.export.trace", "torch.onnx.internal"):
            logging.getLogger(name).warning("a graph of many lines")
        raise RuntimeError("that is all")

    monkeypatch.setattr(torch.onnx, "export", talk)
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    message = refused(capfd, "export", "--model", tmp_path / "model", "--output", tmp_path / "model.onnx")
    assert "that is all" in message and "--fixed may give" in message and "a graph of many lines" not in message
    assert levels == {name: logging.getLogger(name).level for name in TALKATIVE}


@pytest.mark.parametrize("step", [False, True])
def test_an_opset_that_the_exporter_does_not_reach(tmp_path, capsys, monkeypatch, step):
    """It then keeps its own, and says so in a log."""
    pytest.importorskip("onnxscript")
    save(tmp_path / "model", **({"variant": "xf_gpt2", "head": "ForCausalLM"} if step else {}))
    program = SimpleNamespace(model=SimpleNamespace(opset_imports={"": 18}))
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: program)
    message = refused(
        capsys,
        "export",
        "--model",
        tmp_path / "model",
        "--output",
        tmp_path / "model.onnx",
        "--opset",
        "9",
        *(["--step"] if step else []),
    )
    assert "no ONNX graph of opset 9, but one of opset 18" in message
    assert not (tmp_path / "model.onnx").exists()


def test_refusals(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    encoder, decoder, other = tmp_path / "encoder", tmp_path / "decoder", tmp_path / "other"
    save(encoder)
    save(decoder, "xf_gpt2", "ForCausalLM")
    file = tmp_path / "model.onnx"
    message = refused(capsys, "export", "--model", decoder, "--output", file, "--length", 1)
    assert "got 2 x 1: raise --batch or --length" in message
    bigbird = tmp_path / "bigbird"
    save(bigbird, "xf_bigbird", "ForMaskedLM")
    message = refused(capsys, "export", "--model", bigbird, "--output", file)
    assert "give --length and --fixed" in message and "dynamic" not in message
    assert "say which --head it has" in refused(
        capsys, "export", "--model", encoder, "--output", file, "--head", "ForPoetry"
    )
    message = refused(capsys, "export", "--model", encoder, "--output", encoder / "config.json" / "model.onnx")
    assert "give a file in a folder that exists" in message
    assert "There is no folder" in refused(capsys, "export", "--model", tmp_path / "nothing", "--output", file)
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "model of type 'bert'" in refused(capsys, "export", "--model", other, "--output", file)
    (other / "adapter_config.json").write_text("{}")
    assert "holds an adapter alone" in refused(capsys, "export", "--model", other, "--output", file)
    weights = encoder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors is cut off" in refused(capsys, "export", "--model", encoder, "--output", file)
    assert not file.exists()


def test_missing_packages(tmp_path, capsys, monkeypatch):
    save(tmp_path / "model")
    argv = ("--model", tmp_path / "model", "--output", tmp_path / "model.onnx")

    def absent(*args, **kwargs):
        raise ImportError("ONNX graphs are made with onnx and onnxscript: pip install onnx onnxscript")

    monkeypatch.setattr(export, "export_onnx", absent)
    assert "pip install onnx onnxscript" in refused(capsys, "export", *argv)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install onnxruntime" in refused(capsys, "export", *argv, "--check")


@pytest.mark.slow
def test_a_step(tmp_path, capsys):
    """Two files, and what is in them in words; without a cache that grows nothing grows."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    save(tmp_path / "model", "xf_linear_transformer", "ForCausalLM")
    file = tmp_path / "step.onnx"
    assert main(["export", "--model", str(tmp_path / "model"), "--output", str(file), "--step", "--check"]) == 0
    out = capsys.readouterr().out
    assert "of which 0 grow with the text" in out and "step.start.safetensors" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step.onnx", "step.start.safetensors"]


def test_a_step_is_refused(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    model = tmp_path / "model"
    save(model)
    both = refused(capsys, "export", "--model", model, "--output", tmp_path / "step.onnx", "--step", "--fixed")
    assert "--step makes a graph for any batch and length; leave --fixed out" in both
    sample = refused(capsys, "export", "--model", model, "--output", tmp_path / "step.onnx", "--step", "--length", "9")
    assert "--batch and --length are of the sample of a whole text" in sample
    alone = refused(capsys, "export", "--model", model, "--output", tmp_path / "step.onnx", "--step")
    assert "generates nothing, step by step" in alone
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
