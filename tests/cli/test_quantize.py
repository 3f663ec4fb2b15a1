"""`hf-xformers quantize`: numbers that are what they say, folders that load, and what is refused."""

import json

import pytest
import torch
from torch import nn

from hf_xformers.cli import main
from hf_xformers.compression.quantizable import split
from hf_xformers.training.presets import size_fields
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import classification, finetune
from tests.training.runs import flags, pretrain, weights, write_text

pytest.importorskip("torchao", reason="quantisation is torchao's")

from hf_xformers.compression.quantization import FakeQuantized, Quantizing, quantize_module, recipe
from tests.compression.test_methods import make, rows

KINDS = [(w, a) for w in ("int8", "int4") for a in ("full", "int8")]
FAST = {"use_cpu": True, "time_batches": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    options = {"hidden_size": 32, "intermediate_size": 64, "learning_rate": 3e-3, "num_train_epochs": 6}
    finetune("text-classification", data, folder, **options)
    return folder


def quantize(source, output, *extra, **options):
    return main(["quantize", *flags(**{**FAST, "model": source, "output_dir": output, **options}), *extra])


def settings(weights, activations, **more):
    return Quantizing(model="it", weights=weights, activations=activations, **more)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers(bits):
    """Each weight is a whole number of steps, within half a step of what it was; the product is that of the rounded
    weights; a step is max |w| / (2^(bits - 1) - 1/2), of an output or of 32 of its inputs."""
    torch.manual_seed(0)
    linear, x, choice = nn.Linear(64, 24), torch.randn(5, 64), settings(f"int{bits}", "full")
    weight = linear.weight.detach().double().unflatten(-1, (-1, 64 if bits == 8 else 32))
    step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    quantize_module(linear, recipe(choice))
    found = linear.weight.dequantize().double()
    steps = found.unflatten(-1, weight.shape[1:]) / step
    assert (steps - steps.round()).abs().max() < 1e-3
    assert steps.round().min() >= -(2 ** (bits - 1)) and steps.round().max() < 2 ** (bits - 1)
    assert ((found.view_as(weight) - weight).abs() <= step * 0.5001).all()
    torch.testing.assert_close(linear(x).double(), x.double() @ found.T + linear.bias.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_activations(weights):
    """Inputs of each token have a scale and a zero: x is within half a step."""
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24, bias=False), torch.randn(5, 64)
    quantize_module(linear, recipe(settings(weights, "int8")))
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    inputs = ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale
    assert ((inputs - x).abs() <= scale * 0.5001 + 1e-6).all()
    expected = inputs.double() @ linear.weight.dequantize().double().T
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights, activations", KINDS)
def test_training_sees_what_is_saved(weights, activations):
    """A forward pass with rounding is that of the quantised model; afterwards the full weights are there again."""
    model = make(width=32, seed=1).float().train(False)
    choice = settings(weights, activations)
    names, before = set(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    guest = FakeQuantized(choice)
    guest.put(model)
    seen = model(**rows()).logits
    seen.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "q_proj.weight" in n)
    guest.merge(model)
    after = model.state_dict()
    assert set(after) == names and all(torch.equal(after[key], before[key]) for key in before)
    modules = dict(model.named_modules())
    for name in split(model, group_size=choice.grouped).chosen:
        quantize_module(modules[name], recipe(choice))
    torch.testing.assert_close(model(**rows()).logits, seen, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "variant, ends",
    [
        ("product_key_memory", {"feedforward.query_proj"}),
        ("routing_transformer", {"attention.q_proj", "attention.k_proj"}),
        ("conditional_computation_transformer", {"query_gate.inner", "gate.inner"}),
        ("bert", set()),
    ],
)
def test_what_decides_keeps_its_precision(variant, ends):
    """By the family's components; everything else inside the layers is quantised."""
    config = config_class(variant)
    head = "ForMaskedLM" if "ForMaskedLM" in config.heads else "ForSeq2SeqLM"
    fields = size_fields(config, "tiny", two_towers=head == "ForSeq2SeqLM")
    with torch.device("meta"):
        model = family(variant)[head](config(**fields, vocab_size=300, is_encoder_decoder=head == "ForSeq2SeqLM"))
    parts = split(model)
    inside = {name for name in parts.kept if ".layers." in name}
    assert {end for end in ends if any(name.endswith(f".{end}") for name in inside)} == ends
    chosen = {name for name in parts.chosen for end in ends if name.endswith(f".{end}")}
    assert not chosen and any(name.endswith("o_proj") for name in parts.chosen)
    assert bool(inside) == bool(ends)


@pytest.mark.parametrize("weights_, activations", [("int8", "full"), ("int4", "int8")])
def test_a_folder(weights_, activations, source, tmp_path, capsys):
    """It is read as it was saved, by transformers and by the commands, and says what was done. Whatever its numbers
    are: it predicts, and is neither quantised again nor trained."""
    from transformers import AutoModelForSequenceClassification

    from hf_xformers.compression.report import open_model

    out = tmp_path / "out"
    assert quantize(source, out, weights=weights_, activations=activations) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "classifier" in shown and "before and after" in shown
    full, small = (AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in (source, out))
    again = open_model(out)
    ids = torch.randint(5, 100, (4, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found, same = (model(input_ids=ids).logits for model in (full, small, again))
    assert torch.equal(found, same) and not torch.equal(found, expected)
    close = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0)
    assert close > (0.999 if weights_ == "int8" else 0.95)
    kept = {name for name, tensor in weights(out).items() if tensor.dtype == torch.float32 and "weight" in name}
    assert any("classifier" in name for name in kept) and any("embedding" in name for name in kept)
    step = json.loads((out / "compression.json").read_text())["steps"][-1]
    assert step["command"] == "quantize" and step["after"]["bytes"] < step["before"]["bytes"]
    record = json.loads((out / "training_summary.json").read_text())
    assert record["quantization"]["weights"] == weights_ and not any(key.startswith("eval_") for key in record)
    assert main(["predict", "--model", str(out), "--text", "it was a fine day", "--use_cpu", "--no_progress"]) == 0
    assert quantize(out, tmp_path / "twice") == 2
    assert "is quantized already (torchao)" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "twice").exists()
    cut = ["prune", "--model", str(out), "--method", "heads", "--use_cpu", "--output_dir", str(tmp_path / "cut")]
    assert main(cut) == 2 and "is quantized already (torchao)" in " ".join(capsys.readouterr().err.split())
    assert quantize(source, out) == 2 and "holds a model already" in capsys.readouterr().err
    command = ["finetune", "--task", "text-classification", "--model", str(out), "--data", "x.csv"]
    assert main([*command, "--output_dir", str(tmp_path / "tuned")]) == 2
    assert "such weights do not learn" in " ".join(capsys.readouterr().err.split())


def test_a_language_model(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    model = pretrain(text, tmp_path / "gpt", variant="gpt2", objective="clm", hidden_size=32, max_steps=4)
    assert quantize(model, tmp_path / "out", "--sensitivity") == 0
    captured = capsys.readouterr()
    assert "lm_head" in captured.out
    assert "of the outputs' squares" in captured.err
    from transformers import AutoModelForCausalLM

    small = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert small.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_with_a_training_that_knows_of_it(source, data, tmp_path, capsys):
    out, options = (
        tmp_path / "out",
        {"num_train_epochs": 1, "weights": "int4", "disable_tqdm": "true", "max_eval_rows": 5},
    )
    assert quantize(source, out, "--quantization_aware", "--data", *data, **options) == 0
    assert (out / "trained" / "model.safetensors").is_file()
    assert all(tensor.dtype == torch.float32 for tensor in weights(out / "trained").values())
    step = json.loads((out / "compression.json").read_text())["steps"][-1]
    assert step["settings"]["quantization_aware"] is True
    assert (5 * step["after"]["baseline"]) % 1 == 0  # of all 24 rows it is 14/24
    again = ("--quantization_aware", "--data", *data, "--resume_from_checkpoint", "--overwrite_output_dir")
    assert quantize(source, out, *again, **{**options, "weights": "int8"}) == 2
    assert "had weights 'int4', and this command gives 'int8'" in " ".join(capsys.readouterr().err.split())
    assert quantize(source, out, *again, **options) == 0
    assert "is finished already" in " ".join(capsys.readouterr().err.split())


REFUSED = {
    "no model": ({"model": "nowhere"}, "nowhere"),
    "bits": ({"weights": "int2"}, "int2"),
    "group": ({"weights": "int4", "group_size": 1}, "--group_size must be at least 2"),
    "group of int8": ({"group_size": 64}, "--group_size 64 has no effect without --weights int4"),
    "nothing left": ({"weights": "int4", "group_size": 48}, "nothing of the model can be quantized"),
    "keep": ({"keep": "nothing"}, "--keep nothing names no linear module"),
    "no rows": ({"quantization_aware": True}, "name them with --data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, source, tmp_path, capsys):
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    assert quantize(options.pop("model", source), tmp_path / "out", **options) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists(), error


def test_without_torchao(source, tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert quantize(source, tmp_path / "out") == 2
    assert "pip install hf_xformers[quantize]" in capsys.readouterr().err
