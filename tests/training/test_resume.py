"""A run that is killed and resumed ends with the same numbers as one that nobody disturbed, bit for bit."""

import json
import signal

import pytest
import torch

from tests.forks import forks
from tests.training.runs import history, pretrain, pretrain_flags, summary, weights

# Runs the command in child processes (so that the imports are paid once), which die by SIGKILL: after a step, or while
# a checkpoint is half written.
VICTIMS = """
import json, os, signal, sys
import datasets, torch
from transformers import Trainer, TrainerCallback
from hf_xformers.cli.pretrain import run

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def work(place, step, argv):
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if place == "step" and state.global_step == step:
                die()

    write = torch.save
    def save(content, path, *args, **kwargs):
        write(content, path, *args, **kwargs)
        if place == "save" and f"checkpoint-{step}" in str(path) and "optimizer" in str(path):
            die()
    torch.save = save
    run(argv, [Kill()])

signals = []
for place, step, argv in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        work(place, step, argv)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    signals.append(os.WTERMSIG(status) if os.WIFSIGNALED(status) else None)
print(json.dumps(signals))
"""
CASES = [("step", 5, 23), ("save", 10, 20)]  # where it is killed, steps between saves, the step
# An objective whose own draws and second model are part of what a checkpoint has to hold: the replaced tokens are
# drawn from the generator in every step.
FURTHER = {
    "variant": "electra",
    "objective": "replaced_token_detection",
    "max_steps": 7,
    "save_steps": 3,
    "save_strategy": "steps",
    "hidden_dropout_prob": 0.1,
}


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


def compare(output, expected):
    assert history(output) == history(expected)
    mine, theirs = weights(output), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    assert (output / "tokenizer.json").read_bytes() == (expected / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """The folders that the killed runs left."""
    folder = tmp_path_factory.mktemp("killed")
    work = [
        (place, step, pretrain_flags(text, folder / place, **COMMON, save_steps=save_steps))
        for place, save_steps, step in CASES
    ]
    work.append(("step", 5, pretrain_flags(text, folder / "further", **FURTHER)))
    done = forks().run(VICTIMS, json.dumps(work))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [signal.SIGKILL] * len(work), done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("place, save_steps, step", CASES)
def test_kill_9_and_resume(text, undisturbed, killed, place, save_steps, step):
    expected = undisturbed(save_steps)
    assert 1 < steps_per_epoch(expected) < 20 and save_steps % steps_per_epoch(expected), "resumes within an epoch"
    output = killed / place
    assert not (output / "model.safetensors").exists()
    options = {**COMMON, "save_steps": save_steps}
    if place == "save":
        with pytest.warns(UserWarning, match=f"checkpoint-{step} is passed over: it has no trainer_state.json"):
            pretrain(text, output, "--resume_from_checkpoint", **options)
    else:
        pretrain(text, output, "--resume_from_checkpoint", **options)
    compare(output, expected)


@pytest.mark.slow
def test_kill_9_of_a_further_objective(text, killed, tmp_path):
    expected = pretrain(text, tmp_path / "whole", **FURTHER)
    output = killed / "further"
    assert not (output / "model.safetensors").exists() and (output / "checkpoint-3").is_dir()
    pretrain(text, output, "--resume_from_checkpoint", **FURTHER)
    assert any("generator" in name for name in weights(output))
    compare(output, expected)


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
    compare(output, expected)


def test_resume_of_a_finished_run_changes_nothing(text, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    output = pretrain(text, tmp_path / "run", **options)
    before, log = weights(output), history(output)
    (output / "model.safetensors").unlink()  # as if killed between the last checkpoint and the final save
    pretrain(text, output, "--resume_from_checkpoint", **options)
    after = weights(output)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert history(output) == log


def test_masks_and_dropout_are_alive(text, undisturbed):
    """The comparison above would be empty if every epoch were the same."""
    losses = [entry["loss"] for entry in history(undisturbed(5)) if "loss" in entry]
    assert len(set(losses)) == len(losses)
