"""What a run does with a folder: loses nothing that it may not, goes on where it was stopped, stages among it."""

import dataclasses
import inspect

import pytest
import torch
from transformers import TrainingArguments

from hf_xformers.training.loss_terms import Means
from hf_xformers.training.pretraining import train
from hf_xformers.training.run import Run
from tests.training.test_checkpoints import write_checkpoint


def run(folder, *, overwrite=False, **options):
    return Run(TrainingArguments(output_dir=str(folder), use_cpu=True, **options), overwrite=overwrite)


def test_checkpoints_go_when_they_may_and_when_all_is_checked(tmp_path):
    place = tmp_path / "checkpoint-3"
    place.mkdir()
    (place / "trainer_state.json").touch()
    for removes in (True, False):
        with pytest.raises(ValueError, match="holds checkpoint-3 of an earlier run"):
            run(tmp_path).make_room(removes=removes)
    run(tmp_path, overwrite=True).make_room(removes=False)
    assert place.is_dir()
    run(tmp_path, overwrite=True).make_room()
    assert not place.exists()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ValueError, match="already holds a model .*; replace it with --overwrite_output_dir"):
        run(tmp_path).make_room()
    run(tmp_path, overwrite=True).make_room()


def test_a_checkpoint_that_was_interrupted_stops_nothing(tmp_path):
    """Nothing can continue from it; one with weights alone is refused without that advice."""
    place = tmp_path / "checkpoint-3"
    place.mkdir()
    run(tmp_path).make_room(removes=False)
    assert place.is_dir()
    run(tmp_path).make_room()
    assert not place.exists()
    place.mkdir()
    (place / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(ValueError, match="of an earlier run; remove its checkpoints with --overwrite_output_dir"):
        run(tmp_path).make_room()
    place = write_checkpoint(tmp_path, 4)
    with pytest.raises(ValueError, match="holds checkpoint-4 of an earlier run; continue that run with"):
        run(tmp_path).make_room()


def test_a_run_keeps_what_it_starts_from(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    for source in (tmp_path, tmp_path / "checkpoint-3"):
        with pytest.raises(ValueError, match="would replace the model"):
            run(tmp_path, overwrite=True).refuse_own_source(str(source), "the model")
        run(tmp_path, resume_from_checkpoint="True").refuse_own_source(str(source), "the model")
    run(tmp_path, overwrite=True).refuse_own_source(str(tmp_path / "stage"), "the model")
    run(tmp_path, overwrite=True).refuse_own_source(None, "the model")


@pytest.mark.parametrize("value, goes_on", [(None, False), ("no", False), ("True", True), ("some/checkpoint-2", True)])
def test_a_folder_is_taken_over_or_goes_on(value, goes_on, tmp_path):
    made = run(tmp_path, resume_from_checkpoint=value)
    assert made.resumes is goes_on
    if not goes_on:
        with pytest.raises(ValueError, match="holds a thing already; continue it"):
            made.refuse_loss("a thing")
    made.check_settings({"rate": 1, "old": 2}, {"rate": 1})
    with pytest.raises(ValueError, match="had rate 1, and this command gives 2"):
        made.check_settings({"rate": 1}, {"rate": 2})
    stage = made.stage("first", max_steps=7)  # of which nothing is there
    assert (stage.output_dir, stage.max_steps) == (str(tmp_path / "first"), 7)
    assert stage.resume_from_checkpoint is None and made.args.max_steps != 7


def test_a_guest_is_out_of_what_is_saved(tmp_path):
    @dataclasses.dataclass
    class Guest:
        seen: list

        def put(self, model):
            self.seen.append(("put", model))

        def merge(self, model):
            self.seen.append(("merge", model))

    made, seen = run(tmp_path), []
    made.model = "model"
    made.put(Guest(seen), "model")
    made.finish(None, None, save=lambda trainer: seen.append("saved"))
    assert seen == [("put", "model"), ("merge", "model"), "saved"]
    assert (tmp_path / "training_summary.json").is_file()


def test_means_are_over_batches():
    means = Means()
    means.add({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor(5.0)})
    means.add({"a": torch.tensor(4.0)})
    means.add({"b": torch.tensor(1.0)}, batches=0)
    assert means.take(lambda value: value) == {"a": 3.0, "b": 3.0} and means.take(lambda value: value) == {}


def test_the_end_of_a_run_is_that_of_its_processes_unless_told():
    for ends in (train, Run.finish):
        assert inspect.signature(ends).parameters["last"].default is True
