"""Regression learns alike in every unit of the labels, and answers in it wherever it is read again."""

import json

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import hf_xformers.cli
from tests.finetuning.task_data import finetune, predictions, sentences, write_lines

QUIET = {"learning_rate": 0.003, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "seed": 3,
         "num_hidden_layers": 1, "max_grad_norm": 0, "metric_for_best_model": "mse"}  # fmt: skip


def labelled(folder, scale: float, shift: float) -> list[str]:
    files = []
    for split, count in (("train", 48), ("dev", 16)):
        rows = [{"text": text, "label": scale * label + shift} for text, label in sentences(count, count)]
        files.append(str(write_lines(folder / f"{split}.jsonl", rows)))
    return files


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "bert"},
        {"variant": "gpt2", "layer_decay": 1.2},
        {"variant": "pabee", "patience": 0},
        {"variant": "bert", "self_ensemble": "sda"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_labels_in_another_unit_are_learned_alike(options, tmp_path):
    """No clipping, whose threshold is of no unit; dropout 0."""
    options = {name.replace("patience", "stack.patience"): value for name, value in options.items()}
    found = []
    for scale, shift in ((1.0, -0.5), (40.0, 300.0)):
        output = tmp_path / str(scale)
        finetune("regression", labelled(tmp_path, scale, shift), output, **QUIET, **options)
        found.append([(row["prediction"] - shift) / scale for row in predictions(output)])
    assert found[1] == pytest.approx(found[0], abs=2e-3)


def test_several_tasks_have_units_of_their_own(tmp_path):
    words = [{"text": text, "label": label} for text, label in sentences(64, 1)]
    found = []
    for scale, shift in ((1.0, -0.5), (40.0, 300.0)):
        output = tmp_path / str(scale)
        data = labelled(tmp_path, scale, shift)
        both = ["--task", "a=text-classification", "--data", f"a={write_lines(tmp_path / 'a.jsonl', words)}"]
        both += [
            "--task",
            "b=regression",
            "--data",
            f"b={data[0]}",
            f"b={data[1]}",
            "--metric_for_best_model",
            "b_mse",
        ]
        shape = ["--hidden_size", "16", "--num_attention_heads", "2", "--intermediate_size", "32"]
        rest = {name: value for name, value in QUIET.items() if name != "metric_for_best_model"}
        line = [token for name, value in rest.items() for token in (f"--{name}", str(value))]
        line += ["--variant", "bert", "--output_dir", str(output), "--use_cpu", "--num_train_epochs", "1"]
        assert hf_xformers.cli.main(["finetune", *both, *shape, *line]) == 0
        found.append([(row["prediction"] - shift) / scale for row in predictions(output / "b")])
    assert found[1] == pytest.approx(found[0], abs=2e-3)


def test_a_saved_regression_answers_in_the_unit_of_its_labels(tmp_path):
    """Fresh, then as an adapter with a new head, then as the start of a further run: near the labels at once."""
    data = labelled(tmp_path, 40.0, 300.0)
    finetune("text-classification", [str(write_lines(tmp_path / "a.jsonl", [
        {"text": text, "label": label} for text, label in sentences(64, 1)]))], tmp_path / "base")  # fmt: skip
    runs = {"fresh": {}, "lora": {"model": tmp_path / "base", "peft": "lora", "new_head": True}}
    for name, options in runs.items():
        summary = finetune("regression", data, tmp_path / name, max_steps=2, learning_rate=1e-4, **options)
        assert summary["eval_mse"] < 1.5 * 20.0**2 and summary["baseline_validation"]["mse"] < 1.5 * 20.0**2
        output = tmp_path / f"{name}.jsonl"
        command = ["predict", "--model", str(tmp_path / name), "--data", *data, "--output", str(output), "--use_cpu"]
        assert hf_xformers.cli.main(command) == 0
        again = {row["text"]: row["prediction"] for row in map(json.loads, output.read_text().splitlines())}
        for row in predictions(tmp_path / name):
            assert again[row["text"]] == pytest.approx(row["prediction"], abs=1e-3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "fresh")
    answer = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "fresh"))
    for row in predictions(tmp_path / "fresh")[:3]:
        assert answer(row["text"], function_to_apply="none")[0]["score"] == pytest.approx(row["prediction"], abs=1e-3)
    kept = finetune("regression", data, tmp_path / "more", model=tmp_path / "fresh", max_steps=1, learning_rate=0)
    assert kept["eval_mse"] == pytest.approx(summary["eval_mse"], rel=0.5)
