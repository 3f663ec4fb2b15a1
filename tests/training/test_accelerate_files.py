"""The ready config files of scripts/accelerate: Accelerate reads them. (tests/cli/test_launch.py trains with the one
for the CPU.)"""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

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
