"""Losses that count rare classes more: their weights, the loss, training with it, refusals."""

import re

import numpy as np
import pytest
import torch

import hf_xformers.cli
from hf_xformers.finetuning.class_balance import BalancedLoss, class_weights
from tests.finetuning.task_data import BARE, finetune, write_lines

LABELS = [[0, 0, 0, -100, 0], [0, 0, 1], [2, 0, -100]]  # eight examples of class 0, one each of 1 and 2


def test_weights():
    """Equal without balance, scikit-learn's at 1, in between the power; a class that does not occur changes
    nothing."""
    assert class_weights(LABELS, 3, 0.0).tolist() == [1.0, 1.0, 1.0]
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    flat = [label for row in LABELS for label in row if label >= 0]
    full = sklearn.compute_class_weight("balanced", classes=np.array([0, 1, 2]), y=flat)
    assert class_weights(LABELS, 3, 1.0).tolist() == pytest.approx(full.tolist(), rel=1e-6)
    half = class_weights(LABELS, 4, 0.5)
    count = flat.count(0)
    assert (half[1] / half[0]).item() == pytest.approx(count**0.5) and half[1] == half[2] and half[3] == 1.0
    assert sum(half[label].item() for label in flat) / len(flat) == pytest.approx(1.0)


def test_loss():
    """The literal sum over examples; micro-batches over the count of their step are one batch."""
    torch.manual_seed(0)
    logits, labels = (
        torch.randn(2, 5, 3, dtype=torch.float64),
        torch.tensor([[0, 2, -100, 1, 0], [1, -100, -100, 2, 2]]),
    )
    loss = BalancedLoss(torch.tensor([0.5, 2.0, 3.0]))
    terms = [
        loss.weights[label].item() * -torch.log_softmax(logits[row, place], -1)[label].item()
        for row, place in zip(*torch.where(labels >= 0))
        for label in [labels[row, place]]
    ]
    assert loss({"logits": logits}, labels).item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    parts = [loss({"logits": logits[row]}, labels[row], num_items_in_batch=len(terms)) for row in range(2)]
    assert sum(parts).item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert loss({"logits": logits[:0]}, labels[:0]).item() == 0.0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One word in ten may be an entity, and then is in half of the cases: without balance, nothing is the best
    guess."""
    folder = tmp_path_factory.mktemp("rare")
    generator = torch.Generator().manual_seed(0)
    files = []
    for split, count in (("train", 192), ("dev", 64)):
        rows = []
        for _ in range(count):
            names = (torch.rand(10, generator=generator) < 0.2).tolist()
            words = ["maybe" if name else "word" for name in names]
            tags = ["B-X" if name and torch.rand(1, generator=generator) < 0.35 else "O" for name in names]
            rows.append({"tokens": words, "tags": tags})
        files.append(str(write_lines(folder / f"{split}.jsonl", rows)))
    return files


@pytest.mark.parametrize("decoder", ["softmax", "crf"])
def test_rare_entities_are_found(decoder, data, tmp_path):
    options = {"num_train_epochs": 4, "learning_rate": 0.01, "tag_decoder": decoder, "metric_for_best_model": "loss"}
    found = {
        balance: finetune("token-classification", data, tmp_path / str(balance), class_balance=balance, **options)
        for balance in (0.0, 1.0)
    }
    assert found[0.0]["eval_recall"] == 0.0
    assert found[1.0]["eval_recall"] == 1.0 and 0.2 < found[1.0]["eval_precision"] < 0.5
    assert "class_balance" not in found[0.0] and found[1.0]["class_balance"] == 1.0
    assert found[1.0]["eval_loss"] > found[0.0]["eval_loss"]  # which is the same measure for both


def test_accumulated_steps_are_one_step(data, tmp_path):
    """Rows of a step may lie in one batch or in four."""
    common = {"max_steps": 3, "learning_rate": 0.01, "class_balance": 0.5, "hidden_dropout_prob": 0.0}
    common |= {**BARE, "attention_probs_dropout_prob": 0.0}
    sizes = ({"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    one, four = (
        finetune("token-classification", data, tmp_path / str(index), **common, **size)
        for index, size in enumerate(sizes)
    )
    assert one["eval_loss"] == pytest.approx(four["eval_loss"], rel=1e-5)


REFUSED = [
    ("token-classification", ["--class_balance", "1.5"], "--class_balance 1.5 must be between 0"),
    ("language-modeling", ["--class_balance", "0.5"], "language-modeling has none; leave it out"),
    ("token-classification", ["--class_balance", "0.5", "--label_smoothing_factor", "0.1"], "drop one"),
]


@pytest.mark.parametrize("task, options, message", REFUSED)
def test_refusals(task, options, message, data, tmp_path, capsys):
    argv = ["finetune", "--variant", "bert", "--task", task, "--data", *data, "--output_dir", str(tmp_path / "run")]
    assert hf_xformers.cli.main([*argv, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["class_balance", "label_smoothing_factor"])
def test_classifiers_inside_have_losses_of_their_own(option, tmp_path, capsys):
    file = write_lines(tmp_path / "train.jsonl", [{"text": f"a {n}", "label": n % 2} for n in range(8)])
    argv = ["finetune", "--variant", "pabee", "--task", "text-classification", "--data", str(file)]
    assert hf_xformers.cli.main([*argv, "--output_dir", str(tmp_path / "run"), f"--{option}", "0.1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(f"--{option} makes the loss .* xf_pabee has a classifier", said)
