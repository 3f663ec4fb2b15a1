"""Accuracy against depth and time of classifiers that exit early, as `finetune` reports it."""

import json

import pytest

from tests.finetuning.task_data import classification, finetune, tagging


@pytest.mark.parametrize("variant", ["voting_early_exit", "pabee"])
def test_curve(variant, tmp_path, capsys):
    options = {"num_hidden_layers": 4, "learning_rate": 0.01, "num_train_epochs": 2}
    summary = finetune("text-classification", classification(tmp_path), tmp_path / "run", variant=variant, **options)
    curve = summary["exits_validation"]
    assert curve[0]["layers"] == 4 and curve[0]["saved"] == 0
    depths = [row["layers"] for row in curve]
    assert depths == sorted(depths, reverse=True) and depths[-1] <= 2.5
    assert all(0 <= row["accuracy"] <= 1 and row["saved"] <= 1 for row in curve)
    shown = capsys.readouterr()
    assert "mean layers" in shown.out + shown.err
    again = json.loads((tmp_path / "run" / "config.json").read_text())["stack"]
    assert again.get("vote_threshold") is None and again.get("patience") is None  # the settings stay as they were


def test_tokens_that_halt(tmp_path):
    """Tags of words, where pieces of words and special tokens have none."""
    options = {"learning_rate": 0.01, "num_train_epochs": 3, "variant": "token_early_exit"}
    stack = ("--stack.exit_threshold", "0.3")
    summary = finetune("token-classification", tagging(tmp_path, count=96), tmp_path / "run", *stack, **options)
    assert summary["eval_f1"] > 0.7
