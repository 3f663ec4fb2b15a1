"""Experts that are split over 2 and 4 processes on the CPU (gloo) are those of one process.

Everything is in float64, so that a difference is a mistake and no rounding; each job runs once, in all processes.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_xformers.cli import main
from hf_xformers.core.parallel_plans import check_expert_parallel, expert_parallel_plan
from hf_xformers.core.saved_files import SHARDED_OPTIMIZER
from hf_xformers.feedforward.experts import Experts, mix
from hf_xformers.training.expert_parts import ExpertParts
from hf_xformers.training.trainer import XFormerTrainer
from tests.training.distributed_jobs import case_of
from tests.training.expert_jobs import CASES, LAYOUTS, OF_FOUR, RESUMED, SAVED, TRAINED
from tests.training.processes import result, run_jobs
from tests.training.runs import pretrain_flags

TOLERANCE = 1e-9


PLACES = [(world, rank) for world in (1, 2, 4) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("experts")
    jobs = ["expert_parallel", "trainer", "commands"]
    run_jobs("tests.training.expert_jobs", jobs, place, worlds=(1, 2, 4), largest={"commands": 2})
    return place


@pytest.fixture(scope="module")
def results(folder):
    return {place: result(folder, "expert_parallel", *place) for place in PLACES}


@pytest.fixture(scope="module")
def runs(folder):
    return {place: result(folder, "trainer", *place) for place in PLACES}


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
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in CASES), *((name, 4) for name in OF_FOUR)])
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


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 4) for name in TRAINED[world]])
def test_trainer(world, name, runs):
    """6 rows in steps of 4, with clipped gradients and weight decay; the whole model that is saved, and a resumed run.
    Every process reads rows of its own."""
    alone = runs[1, 0][name]
    for rank in range(world):
        found = runs[world, rank][name]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)  # Trainer adds them up in float32
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
        assert found["best"] == alone["best"] == (SAVED if name == "gshard" else None)
        close(found["state"], alone["state"])
        if name == RESUMED.get(world):
            assert found["resumed losses"] == found["losses"]
            for key, tensor in found["state"].items():
                assert torch.equal(found["resumed"][key], tensor), key


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pretrained", "finetuned"])
def test_commands(command, folder):
    """In float32; the first saves the mean of two checkpoints, the second the best one."""
    alone, split = (result(folder, "commands", world)[command] for world in (1, 2))
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    close(split["state"], alone["state"])
    assert split["summary"]["expert_parallel"] == 2 and "expert_parallel" not in alone["summary"]
    averaged = ["checkpoint-2", "checkpoint-3"] if command == "pretrained" else None
    assert split["summary"].get("averaged") == alone["summary"].get("averaged") == averaged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_parallel": "some"}, "--expert_parallel some is no number of processes"),
        ({"expert_parallel": True, "variant": "bert"}, None),
        ({"expert_parallel": True, "variant": "roberta"}, "has no experts that `expert_parallel=2` could split"),
        ({"sequence_parallel": True, "variant": "gpt2"}, "attention 'dense' reads every key of a text"),
        ({"sequence_parallel": "3", "variant": "performer"}, "`sequence_parallel=3` divides texts over so many"),
    ],
)
def test_options_of_the_command(options, words, text, tmp_path, monkeypatch, capsys):
    """What they cannot mean is refused before data is read."""
    if words is not None:
        world_of(monkeypatch, 2)
    code = main(["pretrain", *pretrain_flags(text, tmp_path / "run", max_steps=1, **options)])
    assert code == (0 if words is None else 2)  # one process splits nothing
    if words is not None:
        assert words in capsys.readouterr().err


def world_of(monkeypatch, size):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: size))


TRAINER_REFUSED = {
    "no experts": ("xf_bert", {}, 2, True, {}, "'gelu' has no experts that `expert_parallel=2` could split"),
    "experts": (
        "xf_switch_transformer",
        {"feedforward": {"type": "switch_transformer", "num_experts": 6}},
        4,
        True,
        {},
        "6 experts cannot be split over 4 processes; take an `expert_parallel` that divides them (1, 2, 3, 6)",
    ),
    "processes": (
        "xf_switch_transformer", {}, 4, 3, {}, "`expert_parallel=3` splits experts over so many processes, and 4 are",
    ),
    "precision": ("xf_switch_transformer", {}, 2, 2, {"fp16": True}, "does not go with fp16 (take bf16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRAINER_REFUSED))
def test_trainer_refuses(name, tmp_path, monkeypatch):
    model_type, changes, world, given, options, words = TRAINER_REFUSED[name]
    model = case_of(model_type, "encoder").build(**changes)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    for option, value in options.items():
        monkeypatch.setattr(arguments, option, value)
    world_of(monkeypatch, world)
    with pytest.raises(ValueError) as error:
        XFormerTrainer(model=model, args=arguments, expert_parallel=given)
    assert words in str(error.value)


def test_a_checkpoint_is_resumed_as_it_was_saved(tmp_path):
    """Optimizers of split models are saved in parts, which no other run can read, nor they a file."""
    model = case_of("xf_switch_transformer", "encoder").build()
    trainer = XFormerTrainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="run without `expert_parallel`; resume it without"):
        ExpertParts.load_progress(trainer, None, None, tmp_path)
    (tmp_path / SHARDED_OPTIMIZER).mkdir()
    with pytest.raises(ValueError, match="run with `expert_parallel`; resume it with that"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))


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
        mix(experts, rows, torch.zeros(count, 1, dtype=torch.long), None)
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_the_guide_lists_what_configs_declare():
    path = Path(__file__).parents[2] / "scripts" / "parallel_table.py"
    spec = spec_from_file_location("parallel_table", path)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.written(page) == page, "run `python scripts/parallel_table.py`"
