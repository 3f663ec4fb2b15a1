"""A run that is resumed ends with the same numbers as one that nobody disturbed, bit for bit; `test_kill.py` has runs
that die."""

import shutil

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.training.runs import SHAPE, cut_after, history, pretrain, same_run, summary, weights

# Micro-batches of 4 rows, two to a step; the last step of an epoch has what is left. Dropout is on.
COMMON = {
    "gradient_accumulation_steps": 2,
    "max_steps": 26,
    "logging_steps": 4,
    "eval_strategy": "epoch",
    "eval_on_start": "true",
    "save_strategy": "steps",
    "hidden_dropout_prob": 0.1,
}


def steps_per_epoch(output):
    rows = summary(output)["train_rows"]
    return -(-rows // 4) // 2 + (-(-rows // 4) % 2)


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The runs to compare with, by the steps at which they save."""
    folder = tmp_path_factory.mktemp("undisturbed")
    made = {}

    def run(save_steps):
        if save_steps not in made:
            made[save_steps] = pretrain(text, folder / str(save_steps), **COMMON, save_steps=save_steps)
        return made[save_steps]

    return run


def test_resume_at_the_border_of_an_epoch(text, tmp_path, undisturbed):
    """From the last step of an epoch, where the evaluation belongs to what is past, in the order of the saves."""
    border = steps_per_epoch(undisturbed(5))
    expected = undisturbed(border)
    output = tmp_path / "run"
    options = {**COMMON, "save_steps": border, "save_total_limit": 10}
    pretrain(text, output, **options)
    first = output / f"checkpoint-{border}"
    assert first.is_dir()
    pretrain(text, output, "--resume_from_checkpoint", str(first), **options)
    same_run(output, expected)


def test_resume_of_a_finished_run_changes_nothing(text, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    output = pretrain(text, tmp_path / "run", **options)
    shutil.copytree(output, tmp_path / "before")
    (output / "model.safetensors").unlink()  # as if killed between the last checkpoint and the final save
    pretrain(text, output, "--resume_from_checkpoint", **options)
    same_run(output, tmp_path / "before")


def test_a_model_in_half_precision_goes_on_in_it(text, tmp_path):
    start = pretrain(text, tmp_path / "start", variant="bert", max_steps=1)
    AutoModelForMaskedLM.from_pretrained(start).bfloat16().save_pretrained(start)
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options = {**dict.fromkeys(SHAPE), "init_from": start, **saves}
    whole = pretrain(text, tmp_path / "whole", **options)
    cut = cut_after(2, whole, tmp_path / "cut")
    pretrain(text, cut, "--resume_from_checkpoint", **options)
    assert {tensor.dtype for tensor in weights(cut).values()} == {torch.bfloat16}
    same_run(cut, whole)


def test_masks_and_dropout_are_alive(text, undisturbed):
    """The comparison above would be empty if every epoch were the same."""
    losses = [entry["loss"] for entry in history(undisturbed(5)) if "loss" in entry]
    assert len(set(losses)) == len(losses)
