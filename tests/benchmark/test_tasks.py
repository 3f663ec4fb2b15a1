"""Tasks for training: what models of each head get, and that the answers are not in it."""

from __future__ import annotations

import numpy as np
import pytest

from hf_xformers.benchmark.tasks import TASKS, Rows, SpecialIds, chance, inputs_for, read_task, write_task


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")

    def made(name, length=17, rows=40, held_out=12):
        path = folder / f"{name}-{length}-{rows}.npz"
        if not path.exists():
            write_task(name, length, rows, held_out, 0, path)
        return read_task(path)

    return made


@pytest.mark.parametrize("name", [name for name in TASKS if name != "text"])
def test_held_out_rows_are_others(name, parts):
    found = parts(name)
    train, held_out = ({tuple(row) for row in found[part].input_ids.tolist()} for part in ("train", "held_out"))
    assert len(held_out) == 12 and not train & held_out


@pytest.mark.parametrize("name", ["copy", "mqar"])
def test_tokens_for_each_head(name, parts):
    task, rows = TASKS[name], parts(name)["held_out"]
    special = SpecialIds.of(task)
    asked = rows.labels != -100
    causal = inputs_for(task, rows, "ForCausalLM")
    assert (causal["input_ids"] == rows.input_ids).all() and (causal["labels"][asked] == rows.input_ids[asked]).all()
    masked = inputs_for(task, rows, "ForMaskedLM")
    assert ((masked["input_ids"] == special.mask) == asked).all()
    places = rows.labels if name == "copy" else np.roll(rows.labels, -1, axis=1)  # a value is told at its key
    assert (masked["labels"] == places).all()
    if name == "mqar":
        told = masked["labels"] != -100
        assert (masked["input_ids"][told] < 2 + 8).all()
    decoded = inputs_for(task, rows, "ForSeq2SeqLM")
    assert (decoded["input_ids"] == masked["input_ids"]).all()
    assert [row.tolist() for row in decoded["labels"]] == [
        [label for label in row if label != -100] for row in rows.labels.tolist()
    ]


def test_texts_are_hidden_in_part_for_models_that_fill_gaps():
    ids = np.random.default_rng(0).integers(32, 120, size=(6, 40))
    rows, task = Rows(ids, ids), TASKS["text"]
    assert (inputs_for(task, rows, "ForCausalLM")["labels"] == ids).all()
    masked = inputs_for(task, rows, "ForMaskedLM", seed=1)
    hidden = masked["labels"] != -100
    assert (hidden.sum(1) == 6).all()
    assert (masked["input_ids"][hidden] == SpecialIds.of(task).mask).all() and (masked["input_ids"] == ids)[
        ~hidden
    ].all()
    assert inputs_for(task, rows, "ForSeq2SeqLM", seed=1)["labels"].tolist() == [
        row[where].tolist() for row, where in zip(ids, hidden)
    ]


@pytest.mark.parametrize("name", ["listops", "retrieval"])
def test_classes_for_each_head(name, parts):
    task, rows = TASKS[name], parts(name)["held_out"]
    special = SpecialIds.of(task)
    classified = inputs_for(task, rows, "ForSequenceClassification")
    causal = inputs_for(task, rows, "ForCausalLM")
    masked = inputs_for(task, rows, "ForMaskedLM")
    for index, row in enumerate(rows.input_ids.tolist()):
        row = row if rows.mask is None else row[: rows.mask[index].sum()]
        label = int(rows.labels[index])
        framed = [special.begin, *row, special.ask]

        def real(inputs):
            ids = inputs["input_ids"][index].tolist()
            size = int(inputs["attention_mask"][index].sum()) if "attention_mask" in inputs else len(ids)
            assert set(ids[size:]) <= {special.pad}
            return ids[:size]

        assert real(classified) == framed and classified["labels"][index] == label
        assert real(causal) == [*framed, 2 + label]
        assert real(masked) == [*framed, special.mask]
        where = len(framed)
        assert [position for position, value in enumerate(causal["labels"][index]) if value != -100] == [where]
        assert causal["labels"][index][where] == masked["labels"][index][where] == 2 + label
    assert inputs_for(task, rows, "ForSeq2SeqLM")["labels"].ravel().tolist() == (2 + rows.labels).tolist()


def test_chance_is_that_of_the_most_frequent_answer():
    task = TASKS["retrieval"]
    train = Rows(np.zeros((4, 3), int), np.array([1, 1, 1, 2]))
    found = chance(task, {"train": train, "held_out": Rows(train.input_ids, np.array([1, 2, 2, 1]))})
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(-0.5 * (np.log(0.75) + np.log(0.25)), abs=0.02)


def test_text_is_of_other_documents(parts):
    found = parts("text", 24, 30, 20)
    assert found["train"].input_ids.shape == (30, 24) and found["held_out"].input_ids.shape == (20, 24)
    assert found["train"].input_ids.max() < 256 and (found["train"].labels == found["train"].input_ids).all()


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'sort': choose one of copy, mqar"):
        write_task("sort", 16, 4, 4, 0, tmp_path / "x.npz")
    with pytest.raises(ValueError, match="task 'mqar' needs rows of at least 5 tokens, not 4"):
        write_task("mqar", 4, 4, 4, 0, tmp_path / "x.npz")
