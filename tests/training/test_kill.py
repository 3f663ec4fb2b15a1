"""One run, killed ten times (SIGKILL, at random steps, half of them in the middle of writing a file): after every
death each checkpoint that counts as complete can be read, and the run ends with the weights of one that nobody
disturbed."""

import json
import random
import signal

import pytest

from tests.forks import forks
from tests.training.runs import pretrain, pretrain_flags, same_run

OPTIONS = {
    "max_steps": 36,
    "gradient_accumulation_steps": 2,
    "logging_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 12,
    "eval_on_start": "true",
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 3,
    "hidden_dropout_prob": 0.1,
}
# Where it dies: after a step, or with half of a file of a checkpoint (or of what is written at the end) on the disk.
PLACES = ("step", "weights", "step", "optimizer", "step", "state", "step", "rotation", "step", "final weights")

# Forks a child for every death, so that the imports are paid once; prints what it found after each.
RUNNER = """
import json, os, shutil, signal, sys, warnings
import datasets, torch
import transformers.modeling_utils, transformers.trainer_callback
from pathlib import Path
from safetensors.torch import load_file
from transformers import TrainerCallback
from hf_xformers.cli.pretrain import run
from hf_xformers.training.checkpoints import checkpoints, defect

deaths, argv, output = json.loads(sys.argv[1])
output = Path(output)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def halved(path):
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    die()

class Kill(TrainerCallback):
    def __init__(self, place, step):
        self.place, self.step, self.now = place, step, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.now = state.global_step
        if self.place == "step" and self.now >= self.step:
            die()

    def here(self, place):
        return self.place == place and self.now >= self.step

def work(place, step):
    kill = Kill(place, step)
    save, weights = torch.save, transformers.modeling_utils.safe_save_file
    rmtree, to_json = shutil.rmtree, transformers.trainer_callback.TrainerState.save_to_json

    def save_archive(content, path, *args, **kwargs):
        save(content, path, *args, **kwargs)
        if kill.here("optimizer") and "optimizer" in str(path):
            halved(path)

    def save_weights(content, path, *args, **kwargs):
        weights(content, path, *args, **kwargs)
        if kill.here("weights") or (kill.here("final weights") and "checkpoint" not in str(path)):
            halved(path)

    def save_state(state, path):
        to_json(state, path)
        if kill.here("state"):
            halved(path)

    def remove(path, *args, **kwargs):
        if kill.here("rotation") and "checkpoint" in str(path):
            os.unlink(os.path.join(path, "model.safetensors"))
            die()
        rmtree(path, *args, **kwargs)

    torch.save, transformers.modeling_utils.safe_save_file = save_archive, save_weights
    shutil.rmtree, transformers.trainer_callback.TrainerState.save_to_json = remove, save_state
    complete = [folder for folder in checkpoints(output) if defect(folder) is None]
    run([*argv, "--resume_from_checkpoint"] if complete else [*argv, "--overwrite_output_dir"], [kill])

def readable(folder):
    load_file(folder / "model.safetensors")
    json.loads((folder / "config.json").read_text())
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.load(folder / name, weights_only=False)
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]

found = []
for place, step in deaths:
    child = os.fork()
    if child == 0:
        try:
            work(place, step)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    defects = {folder.name: defect(folder) for folder in checkpoints(output)}
    steps = [readable(output / name) for name, problem in defects.items() if problem is None]
    found.append({"status": status, "complete": steps, "defects": [x for x in defects.values() if x]})
print(json.dumps(found))
"""


def moments() -> list[tuple[str, int]]:
    """Ten places and rising random steps at which the run dies, and an end without a death."""
    draw = random.Random(5)
    steps = sorted(draw.sample(range(1, OPTIONS["max_steps"] - 2), len(PLACES) - 1))
    return [*zip(PLACES, [*steps, OPTIONS["max_steps"]]), ("never", 0)]


@pytest.mark.slow
def test_ten_deaths(text, tmp_path):
    expected = pretrain(text, tmp_path / "undisturbed", **OPTIONS)
    output = tmp_path / "killed"
    order = json.dumps([moments(), pretrain_flags(text, output, **OPTIONS), str(output)])
    done = forks().run(RUNNER, order)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [entry["status"] for entry in found] == [signal.SIGKILL] * len(PLACES) + [0], done.stderr[-4000:]
    problems = [problem for entry in found for problem in entry["defects"]]
    for words in ("has no trainer_state.json", "its trainer_state.json is cut off", "has no model.safetensors"):
        assert any(words in problem for problem in problems), (words, problems)
    assert all(entry["complete"] for entry in found[2:])
    same_run(output, expected)
    assert (output / "tokenizer.json").read_bytes() == (expected / "tokenizer.json").read_bytes()
    assert not list(output.glob(".saving")) and not list(output.glob("*.tmp"))
