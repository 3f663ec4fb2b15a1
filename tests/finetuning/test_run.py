"""Whole runs: learning, the best checkpoint, early stopping, resuming, loading again, the gradient of a step."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.utils import logging

from hf_xformers.training import XFormerTrainer
from tests.finetuning.task_data import (
    BARE,
    DATA,
    classification,
    finetune,
    predictions,
    tagging,
    translation,
    write_lines,
)
from tests.training.runs import cut_after, quiet, same_run, same_weights

LEARN = {"learning_rate": 0.01, "num_train_epochs": 6, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    rows = [{"text": "it was the fine film a"}, {"text": "it was the dull film a"}]
    test = write_lines(folder / "test.jsonl", rows)
    summary = finetune("text-classification", classification(folder), folder / "run", test_data=test, **LEARN)
    return folder / "run", summary


def test_a_classifier_learns(trained):
    output, summary = trained
    assert summary["eval_accuracy"] >= 0.9
    rows = predictions(output)
    right = np.mean([row["prediction"] == row["reference"] for row in rows])
    assert right == pytest.approx(summary["eval_accuracy"])
    assert [row["prediction"] for row in predictions(output, "test")] == ["1", "0"]
    assert "reference" not in predictions(output, "test")[0] and "test_accuracy" not in summary


def test_the_best_checkpoint_is_what_is_saved(trained):
    output, summary = trained
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    scores = {entry["step"]: entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}
    best = int(summary["best_checkpoint"].rpartition("-")[2])
    assert scores[best] == max(scores.values()) == pytest.approx(summary["eval_accuracy"])
    saved, checkpoint = (load_file(f"{place}/model.safetensors") for place in (output, summary["best_checkpoint"]))
    assert all(torch.equal(saved[name], tensor) for name, tensor in checkpoint.items())


@pytest.mark.parametrize(("task", "metric"), [("regression", "mse"), ("language-modeling", "eval_perplexity")])
def test_of_an_error_the_least_is_the_best(task, metric, tmp_path):
    options = {"metric_for_best_model": metric, "variant": "gpt2", "learning_rate": 0.01, "num_train_epochs": 3}
    summary = finetune(task, DATA[task](tmp_path), tmp_path / "run", **options)
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    key = f"eval_{metric.removeprefix('eval_')}"
    errors = {entry["step"]: entry[key] for entry in history if key in entry}
    assert errors[int(summary["best_checkpoint"].rpartition("-")[2])] == min(errors.values()) < max(errors.values())


def test_all_held_out_rows_are_measured(tmp_path):
    """A last batch that is not full is left out of training alone."""
    options = {"dataloader_drop_last": True, "per_device_eval_batch_size": 5, "max_steps": 1}
    finetune("token-classification", tagging(tmp_path), tmp_path / "run", **options)
    assert len(predictions(tmp_path / "run")) == 16


def test_it_loads_again_and_says_the_same(trained):
    output, _ = trained
    config = json.loads((output / "config.json").read_text())
    assert config["id2label"] == {"0": "0", "1": "1"} and config["problem_type"] == "single_label_classification"
    model = AutoModelForSequenceClassification.from_pretrained(output)
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(output))
    for row in predictions(output)[:4]:
        found = classify(row["text"])[0]
        assert found["label"] == row["prediction"] and found["score"] == pytest.approx(row["probability"], abs=1e-5)


def test_tied_tables_are_not_reported_missing(tmp_path, caplog):
    logging.enable_propagation()
    try:
        finetune("translation", translation(tmp_path), tmp_path / "run", max_steps=2)
    finally:
        logging.disable_propagation()
    assert "missing keys" not in caplog.text


def test_early_stopping(tmp_path):
    options = {"early_stopping_patience": 2, "learning_rate": 0, "num_train_epochs": 9}
    summary = finetune("text-classification", classification(tmp_path), tmp_path / "run", **options)
    assert summary["epochs"] == 3.0  # the first is the best, and two more are not better


@pytest.mark.parametrize("best", ["true", "false"])
def test_resume_of_a_finished_run_changes_nothing(best, tmp_path):
    """Its last step may be in the middle of an epoch; also where the best weights are taken."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
               "eval_do_concat_batches": "false", "logging_steps": 1, "load_best_model_at_end": best}  # fmt: skip
    data, out = classification(tmp_path), tmp_path / "run"
    before = finetune("text-classification", data, out, **options)
    cut = cut_after(6, out, tmp_path / "whole")  # as if killed between the last checkpoint and the final save
    out.rename(tmp_path / "before")
    cut.rename(out)
    after = finetune("text-classification", data, out, "--resume_from_checkpoint", **options)
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    same_run(out, tmp_path / "before")


def test_a_resumed_run_ends_the_same(tmp_path):
    data = classification(tmp_path, count=32)
    options = {"num_train_epochs": 3, "load_best_model_at_end": "false", "save_total_limit": 5}
    finetune("text-classification", data, tmp_path / "whole", **options)
    cut = cut_after(4, tmp_path / "whole", tmp_path / "cut")
    finetune("text-classification", data, cut, "--resume_from_checkpoint", **options)
    same_weights(cut, tmp_path / "whole")


@pytest.mark.parametrize("task, write", [("text-classification", classification), ("token-classification", tagging)])
def test_accumulated_steps_are_one_step(task, write, tmp_path):
    """Two halves of a batch train as the whole: for losses that are means over rows, and for those over tokens."""
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data")
    options = {**BARE, **LEARN, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0}
    options |= {"weight_decay": 0, "lr_scheduler_type": "constant", "warmup_steps": 0}
    finetune(task, data, tmp_path / "whole", **options, per_device_train_batch_size=8)
    finetune(task, data, tmp_path / "halves", **options, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    whole, halves = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves"))
    for name, tensor in whole.items():
        torch.testing.assert_close(halves[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def test_ids_of_the_variant_come_from_the_tokenizer(tmp_path):
    """Longformer's config has a separator of its own, which is another token in a vocabulary that is trained here."""
    finetune("text-classification", classification(tmp_path), tmp_path / "run", variant="longformer", max_steps=1)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["sep_token_id"] == AutoTokenizer.from_pretrained(tmp_path / "run").sep_token_id


def test_rows_of_like_lengths_keep_their_predictions(tmp_path):
    """Batches of like lengths are for training; evaluation keeps the order that predictions are matched in."""
    lines = [
        {"text": "it " * (1 + 5 * n % 17) + ("fine" if n % 3 else "dull"), "label": int(n % 3 > 0)} for n in range(96)
    ]
    data = [str(write_lines(tmp_path / f"{split}.jsonl", lines)) for split in ("train", "dev")]
    options = {**LEARN, "num_train_epochs": 3, "train_sampling_strategy": "group_by_length"}
    summary = finetune("text-classification", data, tmp_path / "run", **options)
    assert summary["eval_accuracy"] >= 0.9


def test_positions_grow_to_the_rows_of_a_new_model(tmp_path):
    data = classification(tmp_path)
    finetune("text-classification", data, tmp_path / "run", variant="bert", max_length=600, max_steps=1, **BARE)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["max_position_embeddings"] == 600


@pytest.mark.parametrize(
    "evaluations, best",
    [
        ([(1.0, 3.0), (1.0, 2.0), (1.0, 2.5)], 2),  # a plateau: the lowest loss
        ([(1.0, 3.0), (0.5, 4.0), (0.5, 4.0)], 2),  # the metric first; of equal losses the first
        ([(0.5, 3.0), (1.0, 1.0)], 1),
    ],
)
def test_a_tie_of_metrics_goes_to_the_lower_loss(evaluations, best, tmp_path):
    """(an error rate, a loss) at steps 1, 2, ...; also where the run was resumed before each of them."""
    args = quiet(tmp_path, metric_for_best_model="wer", greater_is_better=False)
    for resumed in (False, True):
        trainer = XFormerTrainer(model=torch.nn.Linear(1, 1), args=args)
        for step, (error, loss) in enumerate(evaluations, start=1):
            if resumed:
                before, trainer = trainer.state, XFormerTrainer(model=torch.nn.Linear(1, 1), args=args)
                trainer.state = before
            metrics = {"eval_wer": error, "eval_loss": loss}
            trainer.state.global_step = step
            trainer.state.log_history.append({**metrics, "step": step})
            trainer._determine_best_metric(metrics, None)
        assert trainer.state.best_global_step == best and trainer.state.best_metric == min(e for e, _ in evaluations)
