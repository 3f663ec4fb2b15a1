"""Rows with any number of labels: lists or separated text, metrics of scikit-learn, predictions, refusals."""

import json
import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.finetuning.task_data import BAD, GOOD, command, finetune, predictions, sentences, write_lines
from tests.refused import refused

TASK = "multi-label-classification"


def labels_of(text):
    """One for a good word, one for a bad one, one for a film; none for some rows."""
    words = text.split()
    names = {"good": GOOD, "bad": BAD, "film": ["film"]}
    return [name for name, among in names.items() if any(word in among for word in words)]


def rows(count, seed):
    texts = [text for text, _ in sentences(count, seed)]
    texts[0] = "the day was a day"
    return [{"text": text, "labels": labels_of(text)} for text in texts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multilabel")
    data = [
        write_lines(folder / f"{split}.jsonl", rows(n, seed)) for split, n, seed in (("train", 256, 0), ("dev", 24, 1))
    ]
    options = {"num_train_epochs": 6, "learning_rate": 0.01, "hidden_dropout_prob": 0.0}
    summary = finetune(TASK, [str(file) for file in data], folder / "run", **options)
    return folder / "run", summary, data


def test_it_learns(trained):
    folder, summary, _ = trained
    assert summary["labels"] == ["bad", "film", "good"]
    assert summary["eval_f1_micro"] > 0.8 and summary["eval_f1_micro"] >= summary["eval_accuracy"]
    config = AutoModelForSequenceClassification.from_pretrained(folder).config
    assert config.problem_type == "multi_label_classification" and config.id2label == {0: "bad", 1: "film", 2: "good"}


def test_metrics_are_those_of_scikit_learn(trained):
    metrics = pytest.importorskip("sklearn.metrics")
    folder, summary, _ = trained
    found = predictions(folder)
    guess, gold = (
        np.array([[name in row[side] for name in summary["labels"]] for row in found])
        for side in ("prediction", "reference")
    )
    assert [] in [row["reference"] for row in found] and any(len(row["reference"]) > 1 for row in found)
    assert summary["eval_f1_micro"] == pytest.approx(metrics.f1_score(gold, guess, average="micro"), abs=1e-12)
    assert summary["eval_f1_macro"] == pytest.approx(metrics.f1_score(gold, guess, average="macro"), abs=1e-12)
    assert summary["eval_accuracy"] == pytest.approx(metrics.accuracy_score(gold, guess), abs=1e-12)


def test_predictions_are_those_of_the_model(trained):
    """Probabilities and loss, computed again one row at a time."""
    folder, summary, data = trained
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    total = 0.0
    found = predictions(folder)
    assert len(found) == 24
    for row, line in zip(found, data[1].read_text().splitlines()):
        assert row["text"] == json.loads(line)["text"]
        assert row["reference"] == sorted(json.loads(line)["labels"])
        with torch.no_grad():
            logits = model.eval()(**tokenizer(row["text"], return_tensors="pt")).logits[0].double()
        for name, logit in zip(summary["labels"], logits.tolist()):
            share = 1 / (1 + math.exp(-logit))
            assert row["probabilities"][name] == pytest.approx(share, abs=1e-4)
            assert (name in row["prediction"]) == (share > 0.5)
            total -= math.log(share if name in row["reference"] else 1 - share)
    assert summary["eval_loss"] == pytest.approx(total / (3 * len(found)), rel=1e-3)


def test_separated_labels(trained, tmp_path):
    """A CSV says the same as lists: equal losses from equal seeds. A threshold near 1 predicts nothing."""
    folder, summary, data = trained
    files = []
    for file in data:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        made = tmp_path / f"{file.stem}.csv"
        made.write_text("text,tags\n" + "".join(f"{row['text']},{' | '.join(row['labels'])}\n" for row in lines))
        files.append(str(made))
    still = {"model": folder, "label_separator": "|", "learning_rate": 0.0}
    again = finetune(TASK, files, tmp_path / "run", **still, seed=1)
    assert again["labels"] == summary["labels"]
    assert again["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)
    strict = finetune(TASK, files, tmp_path / "strict", **still, label_threshold=0.999999)
    assert strict["eval_f1_micro"] == 0.0 and all(row["prediction"] == [] for row in predictions(tmp_path / "strict"))


@pytest.mark.parametrize(
    "made, options, words",
    [
        ([{"text": "a", "labels": "x;y"}], {}, "row 0 of the train split has 'x;y'.*--label_separator"),
        ([{"text": "a", "labels": []}], {}, "no training row has a label"),
        ([{"text": "a", "labels": ["x"]}, {"text": "b", "labels": ["x"]}], {}, "one label 'x'"),
        ([{"text": "a", "labels": ["x", "y"]}], {"label_threshold": 1.5}, "--label_threshold 1.5 is a probability"),
        ([{"text": "a", "labels": ["x", "y"]}], {"label_smoothing_factor": 0.1}, "--label_smoothing_factor spreads"),
    ],
)
def test_refusals(tmp_path, capsys, made, options, words):
    file = write_lines(tmp_path / "train.jsonl", made * 4)
    argv = command(TASK, [str(file)], tmp_path / "run", **options)
    assert re.search(words, refused(capsys, "finetune", *argv))
    assert not (tmp_path / "run").exists()


def test_unknown_labels_are_refused(trained, tmp_path, capsys):
    folder, _, data = trained
    odd = write_lines(tmp_path / "dev.jsonl", [{"text": "a film", "labels": ["film", "odd"]}])
    message = refused(capsys, "finetune", *command(TASK, [str(data[0]), str(odd)], tmp_path / "run"))
    assert "row 0 of the validation split has the label 'odd', which the training rows do not have" in message
    train = write_lines(tmp_path / "train.jsonl", [{"text": "a film", "labels": ["film", "odd"]}] * 8)
    message = refused(capsys, "finetune", *command(TASK, [str(train)], tmp_path / "run", model=folder))
    assert "the label 'odd', which the model's config does not know (it has bad, film, good)" in message
    single = write_lines(
        tmp_path / "single.jsonl", [{"text": "a film", "label": name} for name in ("bad", "film")] * 4
    )
    message = refused(
        capsys, "finetune", *command("text-classification", [str(single)], tmp_path / "run", model=folder)
    )
    assert "take --task multi-label-classification" in message
    message = refused(capsys, "finetune", *command("text-classification", [str(data[0])], tmp_path / "run"))
    assert "take --task multi-label-classification" in message
