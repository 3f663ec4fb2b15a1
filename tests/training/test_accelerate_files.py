"""The ready config files of scripts/accelerate: Accelerate reads them, and the one for the CPU starts two
processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.training.processes import environment
from tests.training.runs import pretrain_flags, summary

FOLDER = Path(__file__).parents[2] / "scripts" / "accelerate"
KINDS = {
    "cpu_2_processes": "MULTI_GPU",
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
}


def test_every_file_is_listed():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", list(KINDS))
def test_accelerate_reads_it(name):
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert str(config.distributed_type).rpartition(".")[2] == KINDS[name]
    assert config.num_processes > 1
    assert path.read_text().startswith("# ") and f"scripts/accelerate/{name}.yaml" in path.read_text()
    # Every field is one of the launcher's; Accelerate only checks those of the first level.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for field in config.fsdp_config:
        assert field in known, field
    for field in config.deepspeed_config:
        assert field in known or field == "offload_optimizer_device", field


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu_2_processes"])
def test_it_starts_two_processes(name, text, tmp_path):
    options = {"variant": "performer", "max_steps": 2, "use_cpu": "true", "ddp_backend": "gloo"}
    settings = environment(ACCELERATE_USE_CPU="true")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml")]
    command += ["--main_process_port", settings["MASTER_PORT"], "-m", "hf_xformers.cli", "pretrain"]
    command += pretrain_flags(text, tmp_path / "run", **options)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert summary(tmp_path / "run")["processes"] == 2
