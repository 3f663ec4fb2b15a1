"""ONNX graphs of models, run by onnxruntime on shapes that were not traced."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel

from hf_xformers.export import export_onnx
from hf_xformers.variants import config_class, family
from tests.common.cases import CASES
from tests.helpers import make_strong, pad, tiny_fields, tokens

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ENCODERS = {case.name: case for case in CASES if case.shape == "encoder"}
DECODERS = {case.name: case for case in CASES if case.shape == "decoder"}
QUICK = ("xf_bert",)
# One for each engine, and those with operators that torch does not translate or with a size that follows from the
# length; that torch can export the other families, transformers' common tests show.
OTHERS = ("xf_reformer", "xf_delta_net", "xf_nystromformer")  # Longformer's: below
# Which of them have the literal equation, and whether their memory grows with the square of the length.
FORMS = {
    **dict.fromkeys(("xf_nystromformer", "xf_delta_net"), (False, False)),
    "xf_reformer": (True, True),
    "xf_bert": (False, True),
}
SIZES = {
    "xf_nystromformer": {"type": "nystromformer", "num_landmarks": 20},  # more than the sample has tokens
    "xf_delta_net": {"type": "delta_net", "chunk_size": 64},  # as by default: of small ones there is no usual path
}


def run(path, given):
    return onnxruntime.InferenceSession(str(path)).run(None, {name: each.numpy() for name, each in given.items()})


def inputs(model, ids, mask):
    types = tokens(*ids.shape, low=0, high=2) if model.config.type_vocab_size > 1 else None
    return {"input_ids": ids, "attention_mask": mask, **({} if types is None else {"token_type_ids": types})}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_parity(name, tmp_path):
    """1e-4 is asked for; padded rows, a single token and longer texts than the sample are among the batches."""
    case = ENCODERS.get(name) or DECODERS[name]
    # Of the engines, a layer: two of the same kind are in the quick model.
    sizes = {} if name in QUICK else {"num_hidden_layers": 1}
    model = case.build(dtype=torch.float32, **sizes, **({"attention": SIZES[name]} if name in SIZES else {}))
    before = model.config._attn_implementation
    report = export_onnx(model, tmp_path / "model.onnx")
    assert report.outputs == ("logits",) and report.dynamic and report.difference < 1e-4
    assert FORMS.get(name) in (None, (report.literal, report.quadratic))
    assert model.config._attn_implementation == before
    for lengths, side in (((9, 5), "right"), ((3, 7, 25), "right"), ((4, 21), "left"), ((1,), "right")):
        ids, mask = pad([tokens(n, seed=n) for n in lengths], max(lengths), side, seed=9)
        given = inputs(model, ids, mask)
        (found,) = run(tmp_path / "model.onnx", given)
        with torch.no_grad():
            expected = model(**given).logits
        real = mask.bool()
        torch.testing.assert_close(torch.from_numpy(found)[real], expected[real], atol=1e-4, rtol=1e-4)


def largest_tensor(path, length):
    """Bytes of the largest result of a node, of one text; as onnxruntime counts them."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), options)
    ids, mask = tokens(1, length), torch.ones(1, length, dtype=torch.long)
    session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    with open(session.end_profiling()) as file:
        return max(int(event.get("args", {}).get("output_size", 0)) for event in json.load(file))


def test_a_window_stays_one(tmp_path):
    """Lengths around a block and a window, on both sides of padding, and no result of length x length numbers."""
    window = {"type": "longformer", "window": 24}
    case, path = ENCODERS["xf_longformer"], tmp_path / "model.onnx"
    model = case.build(dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=2048, attention=window)
    report = export_onnx(model, path)
    assert report.attention == "usual path, memory O(length)" and report.difference < 1e-4
    session = onnxruntime.InferenceSession(str(path))
    for lengths, side in (
        ((1, 1), "right"),
        ((16, 9), "left"),
        ((17,), "right"),
        ((96, 33), "left"),
        ((301,), "right"),
    ):
        ids, mask = pad([tokens(n, seed=n) for n in lengths], max(lengths), side, seed=9)
        (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        with torch.no_grad():
            expected = model(ids, mask).logits
        real = mask.bool()
        torch.testing.assert_close(torch.from_numpy(found)[real], expected[real], atol=1e-4, rtol=1e-4)
    # A number for each pair would take 16 MiB for each head, a boolean 4 MiB.
    assert largest_tensor(path, 2048) < 2048**2


def test_classifier(tmp_path):
    """A head with one answer per text, at one fixed shape."""
    config = config_class("xf_bert")(**tiny_fields(config_class("xf_bert"), num_labels=3))
    torch.manual_seed(0)
    model = make_strong(family("xf_bert")["ForSequenceClassification"](config)).train()
    report = export_onnx(model, tmp_path / "model.onnx", batch=2, length=8, dynamic=False)
    assert model.training and report.shape == (2, 8) and not report.dynamic
    ids, mask = pad([tokens(8), tokens(4, seed=1)], 8, "right")
    given = inputs(model, ids, mask)
    with torch.no_grad():
        expected = model.eval()(**given).logits
    torch.testing.assert_close(torch.from_numpy(run(tmp_path / "model.onnx", given)[0]), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_classifier_of_two_towers(tmp_path):
    """Its decoder reads what the encoder reads, and no padding."""
    config = config_class("xf_bart")(**tiny_fields(config_class("xf_bart"), "seq2seq", num_labels=3))
    torch.manual_seed(0)
    model = make_strong(family("xf_bart")["ForSequenceClassification"](config)).eval()
    report = export_onnx(model, tmp_path / "model.onnx")
    assert report.inputs == ("input_ids", "attention_mask")
    ids, mask = pad([tokens(9), tokens(4, seed=1)], 9, "right", seed=3)
    found = torch.from_numpy(run(tmp_path / "model.onnx", {"input_ids": ids, "attention_mask": mask})[0])
    with torch.no_grad():
        torch.testing.assert_close(found[1:], model(ids[1:, :4]).logits, atol=1e-4, rtol=0)


def test_one_row_at_one_shape(tmp_path):
    """Of a family as well that has a graph for one shape alone."""
    model = ENCODERS["xf_bigbird"].shared(torch.float32)
    assert export_onnx(model, tmp_path / "model.onnx", batch=1, length=9, dynamic=False).shape == (1, 9)
    ids = pad([tokens(9)], 9, "right")[0]
    given = inputs(model, ids, torch.ones_like(ids))
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(torch.from_numpy(run(tmp_path / "model.onnx", given)[0]), expected, atol=1e-4, rtol=0)


def test_refusals(tmp_path, monkeypatch):
    model = ENCODERS["xf_bert"].shared(torch.float32)
    with pytest.raises(ValueError, match="attention 'bigbird' has no graph for every length: .*; give `length`"):
        export_onnx(ENCODERS["xf_bigbird"].shared(torch.float32), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="the model is in torch.bfloat16; give `model.float"):
        export_onnx(ENCODERS["xf_bert"].build(dtype=torch.bfloat16), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="must be 2 x 2 or more, got 1 x 16: raise"):
        export_onnx(model, tmp_path / "model.onnx", batch=1)
    with pytest.raises(TypeError, match="BertModel is no model of hf_xformers, .*; convert it first"):
        export_onnx(BertModel(BertConfig(num_hidden_layers=0)), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="gives prediction_logits, .*, none of which .*; export another `head`"):
        export_onnx(family("xf_bert")["ForPreTraining"](model.config), tmp_path / "model.onnx")

    def fails(*args, **kwargs):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(ValueError, match=r"no ONNX graph of its computation \(no such operator\); `dynamic=False`"):
        export_onnx(model, tmp_path / "model.onnx")

    def lacks(*args, **kwargs):
        raise RuntimeError("No ONNX function found for aten.some_operator")

    monkeypatch.setattr(torch.onnx, "export", lacks)  # one shape would lack it, too
    with pytest.raises(ValueError, match=r"\(No ONNX function found for aten.some_operator\)\.$"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_inverse_of_unit_lower(size):
    """Also of keys that are all alike, of which the powers of the matrix are too large for float32."""
    from hf_xformers.export.triangular import inverse_of_unit_lower

    generator = torch.Generator().manual_seed(size)
    for matrix in (torch.randn(2, 3, size, size, generator=generator) / size, torch.ones(1, size, size)):
        found = torch.from_numpy(inverse_of_unit_lower(matrix.numpy()))
        unit = torch.eye(size).expand_as(matrix)
        expected = torch.linalg.solve_triangular(matrix, unit, upper=False, unitriangular=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
