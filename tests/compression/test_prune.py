"""`hf-xformers prune`: fine-tuned and pretrained models, the table before and after, resumption, refusals that write
nothing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Seq2SeqTrainingArguments, TrainerCallback

from hf_xformers.adapters import add_adapter
from hf_xformers.cli import main
from hf_xformers.cli.prune import run
from hf_xformers.compression import pruning, quantization, rows
from hf_xformers.compression.report import FILE, Measuring, count, measure, open_model, read_steps, refuse_any_adapter
from hf_xformers.compression.rows import save_rest, saving_result
from hf_xformers.core.saved_files import saving_into, weight_files
from hf_xformers.finetuning import trained
from hf_xformers.finetuning.options import TaskData, TaskOptions
from hf_xformers.hub.checkpoint_card import checkpoint_card
from tests.finetuning import task_data
from tests.finetuning.task_data import finetune
from tests.training.runs import flags, pretrain, write_text

SMALL = {"num_attention_heads": 4, "hidden_size": 16, "num_hidden_layers": 2, "hidden_dropout_prob": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    (folder / "data").mkdir()
    data = task_data.classification(folder / "data")
    finetune(
        "text-classification", data, folder / "run", **SMALL, learning_rate=0.01, num_train_epochs=6,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagger")
    (folder / "data").mkdir()
    finetune("token-classification", task_data.tagging(folder / "data"), folder / "run", **SMALL, max_steps=20)
    return folder / "run"


@pytest.fixture(scope="module")
def decoder(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder") / "run"
    extra = "--position rotary --residual pre_ln".split()
    return pretrain(text, folder, *extra, objective="clm", max_steps=10, learning_rate=0.01, **SMALL)


def prune(model, output, *extra, callbacks=(), **options):
    usual = {"time_batches": 1, "time_length": 8, "disable_tqdm": "true", "use_cpu": True}
    words = flags(model=model, output_dir=output, **{**usual, **options})
    assert run([*words, *extra], callbacks) == 0
    return read_steps(output)


def test_heads_of_a_classifier(classifier, tmp_path, capsys):
    (step,) = prune(classifier, tmp_path / "out", method="heads", share=0.4, rows=32, per_device_train_batch_size=4)
    shown = capsys.readouterr()
    assert "3 of 8 heads go" in shown.err and "in 8 batches" in shown.err
    assert "parameters" in shown.out and "accuracy" in shown.out and "time of a batch" in shown.out
    before, after = step["before"], step["after"]
    assert step["command"] == "prune" and step["settings"]["method"] == "heads"
    assert before["parameters"] - after["parameters"] == 3 * (3 * (16 * 4 + 4) + 4 * 16)
    assert after["bytes"] < before["bytes"] and after["metric"] == "accuracy"
    record = json.loads((classifier / "training_summary.json").read_text())
    assert before["quality"] == pytest.approx(record["eval_accuracy"])
    assert before["baseline"] == pytest.approx(record["baseline_validation"]["accuracy"])
    left = [len(rows[0]) for rows in step["settings"]["kept_heads"].values()]
    model = open_model(tmp_path / "out")
    assert sum(left) == 5 and sum(layer.attention.num_heads for layer in model.model.trunk.layers) == 5
    capsys.readouterr()
    assert main(["evaluate", "--model", str(tmp_path / "out"), "--json", "--use_cpu", "--no_progress"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(after["quality"])


def test_it_composes(classifier, tmp_path):
    prune(classifier, tmp_path / "a", method="layers", keep_layers=1)
    prune(tmp_path / "a", tmp_path / "b", method="heads", heads="0:1,3")
    steps = prune(tmp_path / "b", tmp_path / "c", method="weights", sparsity=0.5, exclude="o_proj")
    assert [step["settings"]["method"] for step in steps] == ["layers", "heads", "weights"]
    assert [step["settings"]["by"] for step in steps] == ["top", "number", "magnitude"]
    sizes = [step["after"]["parameters"] for step in steps]
    assert sizes[0] > sizes[1] == sizes[2]
    settings, after = steps[-1]["settings"], steps[-1]["after"]
    assert settings["zeros"] == settings["prunable"] // 2
    assert after["parameters"] - after["nonzero"] >= settings["zeros"]
    model = open_model(tmp_path / "c")
    assert count(model) == (after["parameters"], after["nonzero"])
    assert model.config.num_hidden_layers == 1 and model.config.num_attention_heads == 2


def test_the_record_and_the_card_are_those_of_the_smaller_model(classifier, tmp_path):
    (step,) = prune(classifier, tmp_path / "out", method="weights", sparsity=0.9)
    record = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert record["task"] == "text-classification" and not any(key.startswith("eval_") for key in record)
    card = str(checkpoint_card(tmp_path / "out", "me/smaller"))
    before, after = step["before"], step["after"]
    assert f"| before | {before['parameters']:,} | {before['nonzero']:,} |" in card
    assert f"| `prune`: weights by magnitude | {after['parameters']:,} | {after['nonzero']:,} |" in card
    assert f"accuracy {after['quality']:.4g} (baseline {after['baseline']:.4g})" in card


def test_a_tagger_loses_layers_by_what_its_loss_says(tagger, tmp_path):
    (step,) = prune(tagger, tmp_path / "out", method="layers", by="loss", keep_layers=1, rows=16)
    scores = step["settings"]["importance"]["model.trunk"]
    assert step["settings"]["kept_layers"]["model.trunk"] == [int(scores[1] > scores[0])]
    assert step["after"]["metric"] == "f1"


def test_a_language_model_generates_without_its_heads(decoder, tmp_path):
    (step,) = prune(decoder, tmp_path / "out", method="heads", share=0.25, by_layer=True, rows=16)
    assert step["before"]["metric"] == "loss" and step["before"]["less_is_better"]
    assert step["before"]["baseline"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[7, 8, 9]])
    with_cache = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(with_cache, model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))
    assert not (tmp_path / "out" / "training").exists()


def test_two_of_four_in_a_language_model(decoder, tmp_path):
    (step,) = prune(decoder, tmp_path / "out", method="weights", pattern="2:4")
    assert step["settings"]["zeros"] == step["settings"]["prunable"] // 2
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        if name.endswith("proj.weight"):
            assert (tensor.unflatten(-1, (-1, 4)) != 0).sum(-1).max() <= 2


class Stop(TrainerCallback):
    """Kills a run at a step, as a power cut would: nothing after the checkpoint is written."""

    def on_save(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


TRAINED = {
    "heads": {"by": "gates", "gate_penalty": 3.0, "gate_learning_rate": 3.0},
    "weights": {"by": "movement", "sparsity": 0.5},
}


@pytest.mark.parametrize("method, kind", [("heads", "classifier"), ("weights", "decoder")])
def test_training_goes_on_where_it_was_killed(method, kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    options = {
        **TRAINED[method], "method": method, "max_steps": 8, "save_steps": 4, "save_strategy": "steps",
        "eval_strategy": "no", "logging_steps": 2, "learning_rate": 3e-3, "per_device_train_batch_size": 8,
    }  # fmt: skip
    (whole,) = prune(model, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        prune(model, tmp_path / "cut", callbacks=[Stop()], **options)
    assert not (tmp_path / "cut" / "config.json").exists()
    prune(model, tmp_path / "cut", resume_from_checkpoint="true", **options)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not any("gates" in name or "parametrizations" in name for name in first)
    other = {"gate_penalty": 9.0} if method == "heads" else {"sparsity": 0.8}
    with pytest.raises(ValueError, match="had (gate_penalty 3.0|sparsity 0.5), and this command gives"):
        prune(model, tmp_path / "cut", resume_from_checkpoint="true", **{**options, **other})
    with pytest.raises(ValueError, match="checkpoint-4' names a checkpoint, and this command continues where"):
        prune(model, tmp_path / "cut", resume_from_checkpoint=str(tmp_path / "checkpoint-4"), **options)
    if method == "heads":
        assert whole["after"]["parameters"] < whole["before"]["parameters"]
    else:
        zeros = whole["settings"]["zeros"]
        assert zeros == pytest.approx(whole["settings"]["prunable"] // 2, abs=12)


def test_gates_close_under_a_loss_of_class_weights(classifier, tmp_path):
    """Such a loss is made outside the model, and the penalty has to reach it all the same."""
    shutil.copytree(classifier, tmp_path / "source")
    path = tmp_path / "source" / "training_summary.json"
    summary = json.loads(path.read_text())
    summary["task_options"]["class_balance"] = 0.5
    path.write_text(json.dumps(summary))
    options = {"max_steps": 8, "eval_strategy": "no", "save_strategy": "no", "learning_rate": 3e-3}
    (step,) = prune(tmp_path / "source", tmp_path / "out", method="heads", **options, **TRAINED["heads"])
    assert step["after"]["parameters"] < step["before"]["parameters"]


def test_zeros_stay_while_a_model_trains(classifier, tmp_path):
    options = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no", "learning_rate": 3e-3}
    (step,) = prune(classifier, tmp_path / "out", "--train_masked", method="weights", pattern="2:4", **options)
    assert step["settings"]["zeros"] >= step["settings"]["prunable"] // 2
    before, after = (load_file(folder / "model.safetensors") for folder in (classifier, tmp_path / "out"))
    changed = [
        name for name in before if not torch.equal(before[name][after[name] != 0], after[name][after[name] != 0])
    ]
    assert changed


@pytest.mark.parametrize(
    "words, message",
    [
        ("--method head", "there is no --method 'head'. Did you mean 'heads'?"),
        ("--method heads --heads 0:0,1,2,3", "takes all 4 heads of layer 0; leave it one, or remove the whole layer"),
        ("--method heads --heads 5:0", "names layer 5, and layers with heads are 0, 1"),
        ("--method heads --heads 0-1", "is no LAYER:HEAD,HEAD"),
        ("--method heads --share 0.9", "6 at most can go"),
        ("--method heads --share 1.5", "--share 1.5 is a share of heads between 0 and 1"),
        ("--method heads --by loss", "chosen by gradient or gates, not by 'loss'"),
        ("--method layers --keep_layers 2", "--keep_layers 2 must be at least 1 and less than the model's 2 layers"),
        ("--method layers --layers 0,4", "do not exist: the model has 2"),
        ("--method layers --share 0.2", "--share is for --method heads"),
        ("--method layers --max_steps 3", "--max_steps is about training, and --method layers by top takes no step"),
        (
            "--method heads --heads 0:1 --per_device_train_batch_size 2",
            "is about training, and --method heads by number",
        ),
        ("--method weights --sparsity 1", "--sparsity 1.0 is a share of weights in [0, 1)"),
        ("--method weights --exclude nowhere", "--exclude 'nowhere' is in no name"),
        ("--method weights --pattern 2:4 --sparsity 0.9", "takes half of every four; leave out --sparsity"),
        ("--method heads --heads 0:1 --share 0.2", "--heads says which go; leave out --share"),
        ("--method heads --heads 0:1 --by gradient", "--heads says which go; leave out --by"),
        ("--method heads --gate_penalty 2", "--gate_penalty 2.0 has no effect without --by gates"),
        ("--method weights --by movement --train_masked", "leave out --train_masked"),
    ],
)
def test_bad_input_is_one_paragraph_and_writes_nothing(words, message, classifier, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prune", "--model", str(classifier), "--output_dir", str(out), *words.split(), "--use_cpu"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-xformers: error: ") and message in error
    assert not out.exists() or not any(out.iterdir())


def test_an_adapter_that_a_pruned_model_would_lose_is_refused(classifier, tmp_path):
    model = open_model(str(classifier))
    add_adapter(model, "tags")
    with pytest.raises(ValueError, match="'it' is its base with the adapter 'tags'"):
        refuse_any_adapter(model, "'it'")
    refuse_any_adapter(open_model(str(classifier)), "'it'")


def test_a_folder_is_not_overwritten_by_accident(classifier, tmp_path, capsys):
    prune(classifier, tmp_path / "out", method="layers", measure="false")
    assert read_steps(tmp_path / "out")[0]["after"]["quality"] is None
    words = ["--model", str(classifier), "--output_dir", str(tmp_path / "out"), "--method", "layers", "--use_cpu"]
    assert main(["prune", *words]) == 2
    assert "replace it with --overwrite_output_dir" in capsys.readouterr().err
    assert main(["prune", *words[:2], "--output_dir", str(classifier), *words[4:]]) == 2
    assert "which stays as it is" in capsys.readouterr().err
    prune(classifier, tmp_path / "out", "--overwrite_output_dir", method="weights", measure="false")
    assert len(read_steps(tmp_path / "out")) == 1
    learned = {"method": "weights", "by": "movement", "max_steps": 1, "measure": "false"}
    prune(classifier, tmp_path / "out", "--overwrite_output_dir", **learned)  # a finished result is no training
    (tmp_path / "out" / "config.json").unlink()
    words = ["--model", str(tmp_path / "out" / "training"), *words[2:], "--overwrite_output_dir"]
    assert main(["prune", *words]) == 2
    assert "would replace --model" in capsys.readouterr().err
    assert (tmp_path / "out" / "training" / "model.safetensors").is_file()


def test_measuring_one_model(decoder):
    row = measure(decoder, Measuring(time_batches=1, time_length=4))
    assert (row.seconds > 0 and row.parameters == row.nonzero + 0) or row.nonzero < row.parameters
    assert row.figures["loss"] == row.quality
    with pytest.raises(ValueError, match="--time_batches -1"):
        measure(decoder, Measuring(time_batches=-1))
    assert read_steps(decoder) == [] and not (decoder / FILE).exists()


def test_measuring_a_task_whose_rows_are_not_known(classifier, tmp_path):
    shutil.copytree(classifier, tmp_path / "model")
    (tmp_path / "model" / "training_summary.json").unlink()
    with pytest.raises(ValueError, match="does not say what data it was trained with; give --eval_data"):
        measure(tmp_path / "model", Measuring(time_batches=0))


def test_what_goes_along_with_a_result(tmp_path):
    """The record of a checkpoint is its run's. Other forms of the weights stay behind, and so does an old record."""
    record = {"task": "text-classification", "dataset": {"data": ["rows.csv"]}, "eval_accuracy": 0.9}
    checkpoint, out = tmp_path / "run" / "checkpoint-3", tmp_path / "out"
    checkpoint.mkdir(parents=True)
    for name in ("tokenizer.json", "model.onnx", "model.onnx.data", "model.gguf", "tf_model.h5"):
        (checkpoint / name).write_text("{}")
    (tmp_path / "run" / "training_summary.json").write_text(json.dumps(record))
    with saving_result(out) as staging:
        save_rest(str(checkpoint), staging, parameters=5)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "training_summary.json"}
    left = {"task": "text-classification", "dataset": {"data": ["rows.csv"]}, "parameters": 5}
    assert json.loads((out / "training_summary.json").read_text()) == left
    (tmp_path / "run" / "training_summary.json").unlink()
    with saving_result(out) as staging:
        save_rest(str(checkpoint), staging, parameters=5)
    assert not (out / "training_summary.json").exists()


def test_what_goes_along_from_the_hub(tmp_path, monkeypatch):
    """What the cache holds of a model."""
    source, out = tmp_path / "snapshot", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    (source / "preprocessor_config.json").write_text("{}")
    (source / "training_summary.json").write_text('{"task": "image-classification", "test_accuracy": 1}')
    monkeypatch.setattr(trained, "folder_of", lambda name: source)
    monkeypatch.setattr(rows, "_save_tokenizer", lambda name, folder: None)
    save_rest("me/model", out, parameters=5)
    assert (out / "preprocessor_config.json").is_file()
    found = json.loads((out / "training_summary.json").read_text())
    assert found == {"task": "image-classification", "parameters": 5}


def test_an_adapter_is_a_result_as_well(classifier, tmp_path, capsys):
    adapter = tmp_path / "out" / "adapter_config.json"
    adapter.parent.mkdir()
    adapter.write_text("{}")
    told = ["prune", "--model", str(classifier), "--output_dir", str(adapter.parent), "--method", "weights"]
    assert main([*told, "--measure", "false"]) == 2 and "'adapter_config.json' already" in capsys.readouterr().err
    assert main([*told, "--measure", "false", "--overwrite_output_dir"]) == 0 and not adapter.exists()


def test_shards_are_not_hidden_by_earlier_weights(tmp_path):
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"):
        (tmp_path / name).write_text("old")
    with saving_into(tmp_path) as staging:
        (staging / "model-00001-of-00001.safetensors").write_text("new")
        index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.read_text() for path in weight_files(tmp_path)] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }


@pytest.mark.parametrize(
    "task, message", [(None, "does no task"), ("text-classification", "has no head for --task text-classification")]
)
def test_rounding_is_trained_on_the_models_own_task(task, message, decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "torchao", lambda: None)
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    choice = quantization.Quantizing(model=str(decoder), quantization_aware=True)
    data, options = TaskData(data=["rows.csv"]), TaskOptions(task=task)
    quantizer = quantization.Quantizer(choice, tmp_path / "out", data=data, task=options, args=args)
    with pytest.raises(ValueError, match=f"{message}; fine-tune it first"):
        quantizer.run()
    assert not (tmp_path / "out").exists()


def test_a_model_of_no_known_run_trains_on_the_task_of_its_class(classifier, tmp_path):
    shutil.copytree(classifier, tmp_path / "source")
    (tmp_path / "source" / "training_summary.json").unlink()
    data = sorted((classifier.parent / "data").glob("*.csv"))
    options = {"max_steps": 1, "save_strategy": "no", "measure": "false", "data": data[0]}
    prune(tmp_path / "source", tmp_path / "out", "--train_masked", method="weights", **options)
    assert (tmp_path / "out" / "training" / "model.safetensors").is_file()


def test_importance_is_measured_on_the_device_of_the_run(classifier, tmp_path, monkeypatch):
    model, events = open_model(classifier), []
    monkeypatch.setattr(pruning, "layer_losses", lambda *given: events.append("loss") or (1.0, [1.0, 2.0]))
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    choice = pruning.Pruning(model=str(classifier), method="layers", by="loss", keep_layers=1)
    pruner = pruning.Pruner(choice, Measuring(), args)
    monkeypatch.setattr(Seq2SeqTrainingArguments, "device", "cuda:0")
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, device: events.append(str(device)) or self)
    pruner._without_layers(model)
    assert events[:3] == ["cuda:0", "loss", "cpu"]


def test_tables_without_a_header_line(classifier, tmp_path):
    """Other files of rows are read as those of the training were, and those of a run as its options say."""
    shutil.copytree(classifier, tmp_path / "model")
    path, table = tmp_path / "model" / "training_summary.json", tmp_path / "rows.csv"
    table.write_bytes("\n".join(["gut,0", "schön,1", "fein,1"] * 4).encode("latin-1"))
    record = json.loads(path.read_text())
    form = {"column_names": ["text", "label"], "encoding": "latin-1"}
    record["dataset"] |= form
    path.write_text(json.dumps(record))
    options = {"data": table, "eval_data": table, "rows": 4, "time_batches": 0}
    (step,) = prune(tmp_path / "model", tmp_path / "out", method="heads", **options)
    assert step["before"]["baseline"] == pytest.approx(1 / 3)  # of all 12 rows
    measuring = Measuring(time_batches=0)
    measuring.read_rows_of(TaskData(data=[str(table)], **form), {})
    assert measure(classifier, measuring).quality == step["before"]["quality"]
