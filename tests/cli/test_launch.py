"""`accelerate launch` with two processes on the CPU (gloo), by the file of scripts/accelerate for that: the same
command, one set of files, one voice."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forks import forks
from tests.training.processes import environment
from tests.training.runs import history, pretrain, pretrain_flags, summary, weights

CONFIG = Path(__file__).parents[2] / "scripts" / "accelerate" / "cpu_2_processes.yaml"
OPTIONS = {
    "variant": "gpt2",
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "seed": 3,
}
# The launcher where the imports are done; the processes that it starts are fresh ones.
LAUNCH = "import runpy; runpy.run_module('accelerate.commands.launch', run_name='__main__', alter_sys=True)"
GLOO = {"use_cpu": "true", "ddp_backend": "gloo"}


def launch(*argv):
    settings = environment(ACCELERATE_USE_CPU="true")
    command = ["--config_file", str(CONFIG), "--main_process_port", settings["MASTER_PORT"]]
    return forks().run(LAUNCH, *command, "-m", "hf_xformers.cli", *map(str, argv), **settings)


@pytest.mark.slow
def test_two_processes_train_as_one(text, tmp_path):
    together = tmp_path / "together"
    done = launch("pretrain", *pretrain_flags(text, together, per_device_train_batch_size=2, **OPTIONS, **GLOO))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pretrained") == done.stderr.count("rows of 16 tokens") == 1
    assert summary(together)["processes"] == 2
    assert (together / "checkpoint-4" / "rng_state_1.pth").is_file()
    assert isinstance(AutoTokenizer.from_pretrained(together)("karan")["input_ids"][0], int)
    AutoModelForCausalLM.from_pretrained(together)

    # Without dropout, two processes with 2 rows each make the steps of one process with 4.
    alone = pretrain(text, tmp_path / "alone", per_device_train_batch_size=4, **OPTIONS)
    assert (together / "tokenizer.json").read_bytes() == (alone / "tokenizer.json").read_bytes()
    ours, theirs = history(together), history(alone)
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    for mine, other in zip(ours, theirs):
        assert mine.keys() == other.keys()
        for key in mine.keys() & {"loss", "eval_loss", "eval_accuracy", "eval_tokens"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-4), (key, json.dumps(mine))
    single = weights(alone)
    for name, tensor in weights(together).items():
        torch.testing.assert_close(tensor, single[name], rtol=1e-3, atol=1e-5, msg=name)
