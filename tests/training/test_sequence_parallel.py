"""Texts divided over two to four processes (gloo): outputs, losses and gradients are those of whole texts."""

from __future__ import annotations

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, part_of_batch, sequence_parallel
from hf_xformers.core.sequence_parallel import SequenceForm, Unserved, check_sequence_parallel
from tests.training.processes import result, run_jobs
from tests.training.sequence_jobs import CASES, MEASURED, OF_FOUR, OF_MESH, OF_THREE, RUNS, SIZES, promised

TOLERANCE = 1e-10  # everything is in float64
AVERAGE = "average_tokens_across_devices"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("sequence")
    jobs = ["forms", "components", "traffic", "mesh", "refusals", "trainer"]
    run_jobs("tests.training.sequence_jobs", jobs, place, worlds=(1, 2, 3, 4), largest={"components": 2})
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name"),
    [*((2, name) for name in CASES), *((3, name) for name in OF_THREE), *((4, name) for name in OF_FOUR)],
)
def test_parts_give_what_whole_texts_give(world, name, folder):
    for rank in range(world):
        found = result(folder, "forms", world, rank)[name]
        worst = max(found, key=found.__getitem__)
        assert found[worst] < TOLERANCE, (rank, worst, found[worst])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(promised()))
def test_what_components_promise(name, folder):
    """Those of the other slots that are let through look at single tokens: in a text of 13 tokens over two."""
    for rank in range(2):
        found = result(folder, "components", 2, rank)[name]
        worst = max(found, key=found.__getitem__)
        assert found[worst] < TOLERANCE, (rank, worst, found[worst])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MEASURED))
def test_what_a_layer_sends_does_not_grow_with_the_text(name, folder):
    for rank in range(2):
        short, long = result(folder, "traffic", 2, rank)[name]
        assert short == long > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_MESH)
def test_data_times_sequence(name, folder):
    """A row of processes reads two texts, the other one: gradients are those of one process with all three."""
    for rank in range(4):
        found = result(folder, "mesh", 4, rank)[name]
        worst = max(found, key=found.__getitem__)
        assert found[worst] < TOLERANCE, (rank, worst, found[worst])


@pytest.mark.slow
def test_processes_that_make_no_rows(folder):
    for rank in range(4):
        words = result(folder, "mesh", 4, rank)["refusal"]
        assert "4 processes are not rows of 3" in words and "take a number that divides 4" in words


@pytest.mark.slow
def test_texts_that_a_memory_cannot_be_read_for(folder):
    for rank in range(2):
        found = result(folder, "refusals", 2, rank)
        assert "leave `segment_memory` out" in found["memory"]
        assert "give each document a row of its own" in found["documents"]
        assert "pad rows at one end alone" in found["gap"]
        for name in ("linear_transformer", "longformer"):
            assert f"which attention '{name}' cannot keep apart; give one document per row" in found[name]
        for name in ("streamed", "streamed, one of several", "streamed later"):
            assert "give a dataset of known length" in found[name]
        assert "leave `dispatch_batches` of `accelerator_config` at None or False" in found["dispatched"]


def check_figures(found, alone, rows_of_an_epoch=7):
    """Every text counts once, in evaluation, predictions, own metrics and, as often as it is read, the tokens seen."""
    seen = {"num_input_tokens_seen": 2 * rows_of_an_epoch * 11}
    assert found["metrics"] == pytest.approx({**alone["metrics"], **seen}, rel=1e-6)
    assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-6)
    assert found["own"][0] == alone["own"][0] == [(7, 3)]
    torch.testing.assert_close(found["rows"], alone["rows"])
    torch.testing.assert_close(found["logits"], alone["logits"], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_trainer(name, folder):
    """7 rows in batches of 2: the last one is smaller, and nothing fills it up."""
    alone, first, second = (result(folder, "trainer", *of)[name] for of in ((1, 0), (2, 0), (2, 1)))
    assert len(first["losses"]) == len(alone["losses"])
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-6)  # Trainer adds them up in float32
    for found in (first, second):
        check_figures(found, alone)
        assert found["own"][1:] == pytest.approx(alone["own"][1:], rel=1e-6)
    for key, tensor in alone["state"].items():
        torch.testing.assert_close(first["state"][key], tensor, rtol=1e-9, atol=1e-9)
        assert torch.equal(first["state"][key], second["state"][key])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (*_, options) in RUNS.items() if AVERAGE not in options])
def test_trainer_on_data_times_sequence(name, folder):
    """Two rows of two processes, a text each: the same steps, the last one with a repeated row, which counts for
    nothing."""
    alone = result(folder, "trainer", 1)[name]
    for rank in range(4):
        found = result(folder, "trainer", 4, rank)[name]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        check_figures(found, alone, rows_of_an_epoch=8)
        for key, tensor in alone["state"].items():
            torch.testing.assert_close(found["state"][key], tensor, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------ one process


def test_positions_of_all_rows_move_with_padding_on_the_left(single):
    ids, mask = torch.arange(5, 17).view(3, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(4)[None]}
    part = part_of_batch(batch)
    assert part["input_ids"].tolist() == [[7, 8, 5, 6], [9, 10, 11, 12], [14, 15, 16, 13]]
    assert part["position_ids"].tolist() == [[2, 3, 0, 1], [0, 1, 2, 3], [1, 2, 3, 0]]


def config_of(**fields):
    return XFormerConfig(**{**SIZES, **fields})


REFUSED = {
    "dense": ({}, "attention 'dense' reads every key of a text, which in a causal decoder Accelerate's"),
    "another attention": ({"attention": "nystromformer"}, "'nystromformer' reads more of a text"),
    "a gate": (
        {"attention": {"type": "rfa", "gate": True}, "is_decoder": True}, "'rfa' with `gate` forgets earlier tokens",
    ),
    "a normalised delta rule": (
        {"attention": {"type": "delta_net", "attention_normalize": True}, "is_decoder": True},
        "'delta_net' with `attention_normalize` divides by sums",
    ),
    "the delta rule of DPFP": (
        {"attention": {"type": "dpfp", "update_rule": "delta", "attention_normalize": True}, "is_decoder": True},
        "'dpfp' with `attention_normalize`",
    ),
    "a ring": (
        {"attention": {"type": "block_local_attention", "ring": True}}, "'block_local_attention' as it is set reads",
    ),
    "every g-th token": ({"attention": {"type": "dilated_attention", "strided": True}}, "at any distance"),
    "pooled blocks": ({"attention": {"type": "linformer", "projection": "mean"}}, "`projection` 'mean' makes rows"),
    "experts": ({"attention": "performer", "feedforward": "switch_transformer"}, "feedforward 'switch_transformer'"),
    "statistics": ({"attention": "performer", "normalization": "power_norm"}, "normalization 'power_norm' reads more"),
    "a bias with global tokens": (
        {"attention": "longformer", "position": "alibi"}, "position 'alibi' reads more of a text",
    ),
    "score terms": ({"attention": "band_attention", "position": "shaw_relative"}, "position 'shaw_relative'"),
    "a length": (
        {
            "attention": "linear_transformer",
            "position": {"type": "rotary", "scaling": {"type": "dynamic", "factor": 2.0}},
        },
        "turns tokens by the length of their text",
    ),
    "one layer": (
        {"attention": "performer", "per_layer_config": {1: {"attention": "dense"}}}, "attention 'dense' reads every",
    ),
    "another stack": ({"attention": "performer", "stack": "universal"}, "stack 'universal' reads more"),
    "no memory": ({"attention": "transformer_xl", "position": "none"}, "stack 'plain' as it is set has no memory"),
    "a memory of outputs": (
        {
            "attention": "transformer_xl", "position": "none", "is_decoder": True,
            "stack": {"type": "segment_recurrent", "recurrence": "same_layer"},
        },
        "stack 'segment_recurrent' as it is set has no memory of a layer's own inputs",
    ),
    "a compressed memory": (
        {"attention": "transformer_xl", "position": "none", "is_decoder": True, "stack": "compressive"},
        "stack 'compressive' as it is set",
    ),
    "types of tokens": (
        {
            "attention": {"type": "transformer_xl", "key_types": 2}, "position": "none",
            "stack": "segment_recurrent",
        },
        "'transformer_xl' with `segments` or `key_types` compares token types",
    ),
    "two towers": ({"attention": "performer", "is_encoder_decoder": True, "decoder": {}}, "cross-attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_are_refused(name):
    fields, words = REFUSED[name]
    with pytest.raises(ValueError, match="use data parallelism") as error:
        check_sequence_parallel(config_of(**fields))
    assert words in str(error.value)


def test_specs_say_how():
    """A method with a type, which a caller can ask."""
    for fields, form in (
        ({"attention": "performer"}, SequenceForm.SUM),
        ({"attention": "performer", "is_decoder": True}, SequenceForm.PREFIX),
        ({"attention": "delta_net", "is_decoder": True}, SequenceForm.AFFINE),
        ({"attention": "band_attention"}, SequenceForm.NEIGHBOURS),
        ({"attention": "longformer"}, SequenceForm.CHOSEN),
        ({"attention": "linformer"}, SequenceForm.SHORT),
        ({"attention": "transformer_xl", "stack": "segment_recurrent", "position": "none"}, SequenceForm.MEMORY),
    ):
        config = config_of(**fields)
        assert config.attention.sequence_form(config) is form
        check_sequence_parallel(config)
    config = config_of()
    assert isinstance(config.attention.sequence_form(config), Unserved)


def test_without_processes():
    with pytest.raises(ValueError, match="init_process_group"), sequence_parallel():
        pass


def test_a_single_process_divides_nothing(single):
    model = XFormerForCausalLM(config_of(is_decoder=True)).eval()
    ids = torch.arange(8)[None]
    with sequence_parallel():  # nor does it refuse dense attention
        assert model(**part_of_batch({"input_ids": ids})).logits.shape == (1, 8, 40)
    with pytest.raises(ValueError, match="needs `input_ids`"):
        part_of_batch({"labels": ids})


@pytest.fixture
def single():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
