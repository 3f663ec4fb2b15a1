"""Training on tasks: equal starts, held-out figures, and dense attention solves what a mechanism is to be compared
on."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace

import pytest
import torch

from hf_xformers.benchmark.entries import Entry, baseline, choose_shapes
from hf_xformers.benchmark.quality import Training, build, evaluate, state_size, train_on
from hf_xformers.benchmark.tasks import TASKS, inputs_for, read_task, write_task
from hf_xformers.compat import CACHE
from hf_xformers.variants import config_class
from tests.common.cases import TEXT_TYPES, defaults

ONE = Training(steps=1, batch_size=2, length=12, hidden_size=16, layers=2, held_out=2, evaluations=1)
TINY = Training(steps=4, batch_size=4, length=12, hidden_size=16, layers=1, held_out=6, evaluations=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")

    def made(name, training=TINY):
        path = folder / f"{name}-{training.length}-{training.steps}.npz"
        if not path.exists():
            write_task(name, training.length, training.steps * training.batch_size, training.held_out, 0, path)
        return path

    return made


@pytest.mark.parametrize(
    "variant, shape, task",
    [
        ("xf_performer", "decoder", "copy"),
        ("xf_performer", "decoder", "retrieval"),
        ("xf_bigbird", "encoder", "mqar"),
        ("xf_t5", "seq2seq", "copy"),
        ("xf_switch_transformer", "encoder", "listops"),
    ],
)
def test_training(data, variant, shape, task):
    found = train_on(Entry("x", variant), shape, task, TINY, data(task))
    assert [point[0] for point in found["curve"]] == [0, 2, 4]
    assert all(first[1] <= second[1] for first, second in zip(found["curve"], found["curve"][1:]))
    assert found["curve"][-1][2:] == [found["loss"], found["accuracy"]]
    assert found["loss"] > 0 and 0 <= found["accuracy"] <= 1 and found["seconds"] > 0
    assert found["head"] == (
        "ForSequenceClassification"
        if TASKS[task].classes
        else {"decoder": "ForCausalLM", "encoder": "ForMaskedLM", "seq2seq": "ForSeq2SeqLM"}[shape]
    )
    again = train_on(Entry("x", variant), shape, task, TINY, data(task))
    assert [point[2] for point in again["curve"]] == [point[2] for point in found["curve"]]


def test_figures_do_not_depend_on_the_batches(data):
    model, head = build(baseline("decoder"), "decoder", "mqar", TINY)
    rows = read_task(data("mqar"))["held_out"]
    inputs = {name: torch.from_numpy(column) for name, column in inputs_for(TASKS["mqar"], rows, head).items()}
    whole, pieces = evaluate(model, inputs, head, 6), evaluate(model, inputs, head, 4)
    assert whole["loss"] == pytest.approx(pieces["loss"], rel=1e-5) and whole["accuracy"] == pieces["accuracy"]
    loss = model(**inputs).loss.item()
    assert whole["loss"] == pytest.approx(loss, rel=1e-5)


def test_seed_decides_the_start():
    first, again, other = (
        build(Entry("x", "xf_bert"), "encoder", "copy", Training(hidden_size=16, layers=1, seed=seed))[0].state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("variant", [name for name in TEXT_TYPES if "ForCausalLM" in config_class(name).heads])
def test_the_state_is_all_that_a_cache_keeps_of_a_row(variant):
    """What pickling the cache comes across, where a second row doubles it: what does not is no state of a text."""

    def numbers(rows):
        found = {}

        class Reader(pickle.Pickler):
            def persistent_id(self, value):
                return found.setdefault(id(value), value) is value if isinstance(value, torch.Tensor) else None

        with torch.no_grad():
            Reader(io.BytesIO()).dump(getattr(model(input_ids=ids.repeat(rows, 1), use_cache=True), CACHE).layers)
        return [value.numel() * value.is_floating_point() for value in found.values()]

    size = replace(ONE, layers=4) if variant == "xf_axial_transformer" else ONE
    model, ids = build(Entry("x", variant), "decoder", "mqar", size)[0].eval(), torch.arange(2, 14)[None]
    kept = sum(one for one, two in zip(numbers(1), numbers(2), strict=True) if two == 2 * one)
    assert state_size(model, ids) == kept > 0


@pytest.mark.slow
@pytest.mark.parametrize("task, steps", [("copy", 100), ("mqar", 300)])
def test_dense_attention_solves_it_at_the_defaults(data, task, steps):
    """In fewer steps than those, even."""
    training = Training(steps=steps)
    assert steps < Training().steps
    found = train_on(baseline("decoder"), "decoder", task, training, data(task, training))
    assert found["accuracy"] > 0.97 > 0.2 > found["chance accuracy"]


OF_STACKS = {defaults(name).stack.type: name for name in TEXT_TYPES}.values()


@pytest.mark.parametrize("variant", TEXT_TYPES)
def test_every_variant_can_be_trained(data, variant):
    """On answers of its tokens; a classifier is trained on whatever hands it vectors, one variant of each stack."""
    entry = Entry("x", variant)
    for task in ("mqar", "listops") if variant in OF_STACKS else ("mqar",):
        shape = choose_shapes([entry], None, TASKS[task].order)["x"]
        size = replace(ONE, layers=4) if variant == "xf_axial_transformer" else ONE  # outer and inner ones
        found = train_on(entry, shape, task, size, data(task, size))
        assert found["loss"] > 0 and [point[0] for point in found["curve"]] == [0, 1]
