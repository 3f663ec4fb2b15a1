"""Experts that are split over 2 and 4 processes on the CPU (gloo) are those of one process.

Everything is in float64, so that a difference is a mistake and no rounding; each job runs once, in all processes.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from hf_xformers.core.parallel_plans import check_expert_parallel, expert_parallel_plan
from hf_xformers.feedforward.experts import Experts
from tests.training.distributed_jobs import case_of
from tests.training.expert_jobs import CASES, LAYOUTS
from tests.training.processes import result, run_jobs

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    run_jobs("tests.training.expert_jobs", ["expert_parallel"], folder, worlds=(1, 2, 4))
    places = [(world, rank) for world in (1, 2, 4) for rank in range(world)]
    return {place: result(folder, "expert_parallel", *place) for place in places}


def near(actual, expected, name=""):
    """Equal up to rounding, for which float32 has 1e-5."""
    tolerance = TOLERANCE if actual.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        actual.to(expected.dtype), expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        near(actual[name], tensor, name)


@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(CASES))
def test_experts_of_many_processes(name, layout, world, results):
    """Outputs, losses, balance losses, gradients and the saved checkpoint."""
    alone = results[1, 0][name]
    for rank in range(world):
        found = results[world, rank][f"{name}, {layout}"]
        near(found["logits"], alone["logits"])
        close(found["task gradients"], alone["task gradients"])
        if "gradients" in found:
            near(found["loss"], alone["loss"])
            close(found["aux"], alone["aux"])
            close(found["gradients"], alone["gradients"])
        close(found["state"], alone["state"])
        assert found["experts"] == {CASES[name][2]["num_experts"] // world}
    assert alone["aux"] or name == "hashes"


REFUSED = {
    "no experts": ("xf_bert", {}, 2, "feedforward 'gelu' has no experts that `ep_size=2` could split"),
    "no divisor": (
        "xf_switch_transformer",
        {"feedforward": {"type": "switch_transformer", "num_experts": 6}},
        4,
        "6 experts cannot be split over 4 processes; take an `ep_size` that divides them (1, 2, 3, 6)",
    ),
    "slices": (
        "xf_hash_layers",
        {"feedforward": {"type": "hash_layers", "num_experts": 4, "multi_hash": 2}},
        2,
        "puts the network of a token together from slices of several experts",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_splits(name):
    model_type, changes, size, words = REFUSED[name]
    config = case_of(model_type, "encoder").config(**changes)
    with pytest.raises(ValueError) as error:
        check_expert_parallel(config, size)
    assert words in str(error.value)
    check_expert_parallel(config, 1)
    assert (expert_parallel_plan(config) is None) == (name != "no divisor")


def test_refused_precision():
    """torch's FSDP2 divides gradients in float16 and float64 twice where a group is a single process."""
    from transformers.distributed import DistributedConfig

    model = case_of("xf_switch_transformer", "encoder").build()
    with pytest.raises(ValueError, match="load the model in bfloat16 or float32"):
        model.to(torch.float16)._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))
    model.to(torch.bfloat16)._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))


def test_experts_draw_their_own_dropout():
    """Processes have unequal numbers of rows, and must draw the same numbers afterwards all the same."""
    experts = Experts(4, 8, 16, activation="relu", bias=False, dropout=0.5).train()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    experts._is_expert_parallel = True
    after = []
    for count in (3, 7):
        torch.manual_seed(0)
        rows = torch.ones(count, 8)
        experts.mix(rows, torch.zeros(count, 1, dtype=torch.long), None)
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_the_guide_lists_what_configs_declare():
    path = Path(__file__).parents[2] / "scripts" / "parallel_table.py"
    spec = spec_from_file_location("parallel_table", path)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.written(page) == page, "run `python scripts/parallel_table.py`"
