"""Two processes on the CPU (gloo) learn what one learns: DDP, Trainer, FSDP2 and tensor parallelism; of the last two
also four.

Everything is in float64, so that a difference is a mistake and no rounding; each job runs once, in all processes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from re import fullmatch
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM
from hf_xformers.blocks.base import XFormerLayer
from hf_xformers.blocks.vanilla import VanillaBlockSpec
from hf_xformers.core.components import SLOTS, register
from hf_xformers.core.parallel_plans import check_tensor_parallel, layers_apart, tensor_parallel_plan
from hf_xformers.core.whole_modules import ties_beyond_ends
from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields
from tests.training.distributed_jobs import (
    BALANCED,
    RUNS,
    SAVED_OF_FOUR,
    SHARDED_RUNS,
    SPLIT,
    SPLIT_OF_FOUR,
    SPLIT_RUNS,
    breadth_cases,
    case_of,
    cases_of_four,
    sharded_cases,
)
from tests.training.processes import result, run_jobs

OF_TWO = ("data_parallel", "trainer_runs", "sharded_trainer", "sharded_in_half", "trainer_of_split")
JOBS = [*OF_TWO, "fully_sharded", "tensor_parallel"]
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("jobs")
    run_jobs("tests.training.distributed_jobs", JOBS, place, worlds=(1, 2, 4), largest=dict.fromkeys(OF_TWO, 2))
    return place


@pytest.fixture(scope="module")
def results(folder):
    """The results of a job: of the process that was alone, and of two or four."""

    @cache
    def read(job, world, rank):
        return result(folder, job, world, rank)

    return lambda job, world=2: [read(job, 1, 0), *(read(job, world, rank) for rank in range(world))]


def close(actual, expected, tolerance=TOLERANCE, where=""):
    """Equal states; tolerance 0: bit for bit."""
    assert actual.keys() == expected.keys(), where
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{where} {name}: {text}"
        )


@pytest.mark.slow
def test_families_learn_the_same(results):
    """Those that together have all that a step changes. DDP without a broadcast of buffers: parameters, running
    statistics, centroids, counters, random features. Rows are of unequal lengths, so the processes hold unequal
    numbers of tokens."""
    every, first, second = results("data_parallel")
    assert every.keys() == first.keys() == second.keys() and len(every) > 50
    for name, alone in every.items():
        close(first[name], second[name], 0, f"{name}, of both processes")
        close(first[name], alone, where=name)


def test_states_do_move():
    """The comparison would be empty for buffers that stay as they start."""
    watched = {
        "xf_power_norm": "running_gradient",
        "xf_product_key_memory": "running_var",
        "xf_routing_transformer": "centroids",
        "xf_performer": "directions",
    }
    from tests.training import distributed_jobs as jobs

    for name, buffer in watched.items():
        case = next(case for case in breadth_cases() if case.name == name)
        start = case.build(strong=True, **jobs.NO_DROPOUT, **jobs.CHANGES.get(name, {})).state_dict()
        end = jobs._train(case, slice(None), 1)
        moved = [key for key in start if key.endswith(buffer) and not torch.equal(start[key], end[key])]
        assert moved, (name, buffer)


# ------------------------------------------------------------------------------------------------ Trainer

NOT_LINEAR = ("experts with losses",)  # a process balances its own rows, as the released implementations do


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_trainer(name, results):
    alone, first, second = (job[name] for job in results("trainer_runs"))
    close(first["state"], second["state"], 0)
    for job in (alone, first):
        close(job["resumed"], job["state"], 0)
    assert len(first["losses"]) == len(alone["losses"]) > 5
    if name in NOT_LINEAR:
        return
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-6)  # Trainer adds them up in float32
    close(first["state"], alone["state"])
    if not name.startswith("plain"):  # which averages over batches, however many tokens they have
        assert first["metrics"] == pytest.approx(alone["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED_RUNS)
def test_trainer_with_fsdp(name, results):
    """What FSDP2 saves is a plain model, and the steps are those of one process without it."""
    alone, first, second = (job[name] for job in results("sharded_trainer"))
    assert first["split"] == second["split"] == {"DTensor"} != alone["split"]
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    if not name.startswith("plain"):  # as above
        assert first["eval_loss"] == pytest.approx(alone["eval_loss"])
    close(first["state"], alone["state"])
    close(first["resumed"], first["state"], 0)


@pytest.mark.slow
def test_float32_under_fsdp_in_half_precision(results):
    """What stays in float32 is read in it, whole, and the step is that of float32 up to roundings to 8 bits."""
    every, *both = results("sharded_in_half")
    for name, alone in every.items():
        assert {(dtype, kind) for _, dtype, kind in alone["read"]} == {(torch.float32, torch.nn.Parameter)}, name
        for found in (job[name] for job in both):
            assert found["read"] == alone["read"], name
            assert (found["step"] - alone["step"]).norm() < 0.1 * alone["step"].norm(), name


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), [*((case.name, 2) for case in sharded_cases()), *((case.name, 4) for case in cases_of_four())]
)
def test_families_under_their_fsdp_plans(name, world, results):
    """Those that together have all that a plan can go wrong with; every plan's names are looked at below. Four
    processes have a row each."""
    alone, *every = (job[name] for job in results("fully_sharded", world))
    sharded, all_of_them = every[0]["split"]
    assert sharded == all_of_them > 0
    torch.testing.assert_close(every[0]["logits"], alone["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(sum(found["loss"] for found in every), world * alone["loss"])
    close(every[0]["state"], alone["state"])
    if world == 4:
        assert all("saved" in found for found in every) == (name in SAVED_OF_FOUR)
    for found in every if "saved" in every[0] else ():
        close(found["saved"], alone["state"])


def test_what_four_processes_train():
    """The choice has what it should show."""
    cases = {case.name: case for case in cases_of_four()}
    assert {layers_apart(case.preset) for case in cases.values()} == {True, False}
    models = [cases[name].build() for name in SAVED_OF_FOUR]
    assert any(model.all_tied_weights_keys for model in models)
    assert any(model.config.is_encoder_decoder for model in models)
    assert any(model.config.feedforward.expert_count() for model in models)


@pytest.mark.slow
def test_a_sharded_checkpoint_of_every_stack(results):
    stacks = {case.name: case.preset.stack.type for case in breadth_cases()}
    written = [stacks[name] for name, found in results("fully_sharded")[1].items() if "saved" in found]
    assert sorted(written) == sorted(set(stacks.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in SPLIT), *((name, 4) for name in SPLIT_OF_FOUR)])
def test_tensor_parallel(name, world, results):
    """A step of processes that hold a part of the heads and inner channels each, and the model that they save; four
    have a head each, and a quarter of a table whose rows four does not divide."""
    alone, *every = (job[name] for job in results("tensor_parallel", world))
    for job in every:
        for key in ("loss", "logits"):
            torch.testing.assert_close(job[key], alone[key], rtol=TOLERANCE, atol=TOLERANCE)
        close(job["state"], alone["state"])
        parts = {key.rsplit(".", 2)[-2] for key in job["split"]}
        assert {"q_proj", "up_proj"} & parts and "tokens" in parts  # the table, and what is tied to it


@pytest.mark.slow
@pytest.mark.parametrize("rows", [11, 12])
@pytest.mark.parametrize("name", list(SPLIT_RUNS))
def test_trainer_of_split_models(name, rows, results):
    """Both processes read every batch: it counts once, in losses, auxiliary losses, figures and tokens seen."""
    alone, first, second = (job[f"{name}, {rows}"] for job in results("trainer_of_split"))
    for job in (first, second):
        assert job["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert job["metrics"] == pytest.approx(alone["metrics"])
        torch.testing.assert_close(job["rows"], alone["rows"])
    assert alone["rows"].shape[0] == 7 and alone["metrics"]["num_input_tokens_seen"] == 2 * rows * 12
    close(first["state"], alone["state"])


def tensor_parallel_rules(model):
    return set(tensor_parallel_plan(model.config) or ())


@pytest.mark.parametrize("case", breadth_cases(), ids=lambda case: case.name)
def test_plans_name_what_is_there(case):
    model = case.build()
    names = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in model.named_modules()
    }
    rules = tensor_parallel_rules(model) | set(model.config.base_model_fsdp_plan)
    assert {f"model.{rule}" for rule in rules} <= names
    split = {f"model.{rule}" for rule in rules} | set(model.fsdp_plan)
    tied = {
        name.removesuffix(".weight")
        for name, table in (model._tied_weights_keys or {}).items()
        if "model.trunk.embedding.tokens" in model.tp_plan and table.endswith("embedding.tokens.weight")
    }
    assert split | tied == set(model.tp_plan) | set(model.fsdp_plan)
    # Accelerate looks the layers up by name.
    assert model._no_split_modules <= {type(module).__name__ for module in model.modules()}
    units = eval("model._no_split_modules", {"__name__": "accelerate.utils.fsdp_utils", "model": model})
    assert bool(units) == layers_apart(model.config)
    if layers_apart(model.config):  # then no parameter is read in the calls of two layers
        layers = [module for name, module in model.named_modules() if fullmatch(r"model\.(\w+)\.layers\.\d+", name)]
        parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
        assert len(parameters) == len(set(parameters)) > 0


SHARED = {
    "tied": ("xf_bert", "ForMaskedLM", {}, True),
    "two towers": ("xf_t5", "ForSeq2SeqLM", {}, False),
    "two towers, another output": ("xf_t5", "ForSeq2SeqLM", {"tie_word_embeddings": False}, False),
    "a third matrix": ("xf_span_bert", "ForSpanBoundary", {}, False),
    "a third matrix of its own": ("xf_span_bert", "ForSpanBoundary", {"tie_word_embeddings": False}, True),
    "a generator": ("xf_electra", "ForReplacedTokenPreTraining", {}, False),
    "a generator of its own": (
        "xf_electra", "ForReplacedTokenPreTraining",
        {"pretraining": {"replaced_tokens": {"generator_sharing": "untied"}}}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(SHARED))
def test_what_shares_a_table_under_accelerates_fsdp(case):
    """It shards the table together with the output matrix, and all else apart."""
    name, head, changes, fits = SHARED[case]
    kind = "seq2seq" if head == "ForSeq2SeqLM" else "encoder"
    model = family(name)[head](config_class(name)(**tiny_fields(config_class(name), kind, **changes)))
    assert ties_beyond_ends(model) != fits
    table = model.get_input_embeddings()
    for wrapped in (model, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
        # as `fsdp2_prepare_model` does
        asked = {"__name__": "accelerate.utils.fsdp_utils", "model": wrapped}
        assert eval("model.get_input_embeddings()", asked) is (table if fits else None)
        assert wrapped.get_input_embeddings() is table
        output = model.get_output_embeddings()
        assert eval("model.get_output_embeddings()", asked) is (output if fits else None)


def test_units_of_fsdp_and_parts_of_device_maps():
    """Layers that run in pieces are no units, and whole on a device, as modules with tensors of their own are."""
    model = family("xf_reformer")["ForMaskedLM"](
        config_class("xf_reformer")(**tiny_fields(config_class("xf_reformer"), "encoder"))
    )
    asked = {"__name__": "accelerate.utils.fsdp_utils", "model": model}
    assert eval("model._no_split_modules", asked) == set()
    assert model._no_split_modules == {"XFormerLayer", "ReformerAttention"}


@pytest.mark.parametrize(("name", "given"), [("xf_bert", True), ("xf_performer", False)])
def test_buffers_that_no_other_process_is_given(name, given, monkeypatch):
    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    asked = {"__name__": "accelerate.utils.fsdp_utils", "model": case_of(name, "encoder").build()}
    with nullcontext() if given else pytest.raises(ValueError, match="have the buffer .*directions.*; leave it off"):
        eval("model._no_split_modules", asked)


def test_layers_of_a_class_from_elsewhere_are_found():
    """A block that is registered outside the package brings a layer class; Accelerate's FSDP has to find it by
    name."""

    class ForeignLayer(XFormerLayer):
        pass

    @register("block", "foreign_for_fsdp")
    class ForeignSpec(VanillaBlockSpec):
        def build(self, config, **where):
            return ForeignLayer(config, self, **where)

    try:
        sizes = dict(vocab_size=20, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8)
        config = XFormerConfig(**sizes, is_encoder_decoder=True, decoder={"block": "foreign_for_fsdp"})
        assert XFormerForSeq2SeqLM(config)._no_split_modules == {"XFormerLayer", "ForeignLayer"}
    finally:
        del SLOTS["block"]._specs["foreign_for_fsdp"]


REFUSED = {
    "statistics of batches": ("xf_power_norm", {}, 2, "keeps statistics of the batches of all processes"),
    "centroids": ("xf_routing_transformer", {}, 2, "routing_transformer' keeps statistics"),
    "batch norm of queries": ("xf_product_key_memory", {}, 2, "product_key_memory' keeps statistics"),
    "nothing to split": ("xf_talking_heads", BALANCED, 2, "has nothing that tensor parallelism could split"),
    "heads": ("xf_bert", {}, 3, "4 heads cannot be split over 3 processes; take a `tp_size` that divides them"),
    "key/value heads": (
        "xf_bert",
        {"num_key_value_heads": 2},
        4,
        "2 key/value heads cannot be split over 4 processes",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_splits(name):
    model_type, changes, size, words = REFUSED[name]
    config = case_of(model_type, "encoder").config(**changes)
    with pytest.raises(ValueError) as error:
        check_tensor_parallel(config, size)
    assert words in str(error.value)
    assert "use data parallelism" in str(error.value)
    if size == 2:
        assert config.base_model_tp_plan is None
    check_tensor_parallel(config, 1)


def test_layers_that_differ():
    """A rule is for all layers of a tower, so one that cannot be split keeps the others whole."""
    cls = config_class("xformer")
    common = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    mixed = cls(**common, per_layer_config={1: {"attention": "talking_heads"}}, position="none")
    rules = {f"trunk.layers.*.feedforward.{x}_proj" for x in ("up", "down")}
    assert set(mixed.base_model_tp_plan) == {*rules, "trunk.embedding.tokens"}
    gated = cls(**common, per_layer_config={1: {"feedforward": "swiglu"}}, position="none")
    assert gated.base_model_tp_plan["trunk.layers.*.feedforward.gate_proj"] == "colwise"
