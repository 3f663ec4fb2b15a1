import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainingArguments

from hf_xformers.training import XFormerTrainer
from hf_xformers.training.checkpoints import checkpoint_to_resume, checkpoints, defect, newest_complete
from hf_xformers.variants import config_class, family
from tests.training.runs import SHAPE


def write_checkpoint(run, step, ranks=1):
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.arange(100.0), "bias": torch.zeros(3)}, folder / "model.safetensors")
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    for name in ("optimizer.pt", "scheduler.pt", *names):
        torch.save({"state": torch.arange(50.0)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    return folder


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def test_a_whole_checkpoint_has_no_defect(tmp_path):
    assert defect(write_checkpoint(tmp_path, 5)) is None
    assert defect(write_checkpoint(tmp_path, 6, ranks=2), world_size=2) is None


FILES = ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_defect(tmp_path, name):
    folder = write_checkpoint(tmp_path, 5)
    (folder / name).unlink()
    assert defect(folder) == f"it has no {name}"


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_file_is_a_defect(tmp_path, name):
    folder = write_checkpoint(tmp_path, 5)
    truncate(folder / name)
    assert defect(folder) == f"its {name} is cut off"


def test_shards_are_checked_through_their_index(tmp_path):
    folder = write_checkpoint(tmp_path, 5)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert defect(folder) == "it has no model-00002-of-00002.safetensors"
    save_file({"bias": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    assert defect(folder) is None


def test_every_process_needs_its_random_state(tmp_path):
    assert defect(write_checkpoint(tmp_path, 5), world_size=2) == "it has no rng_state_0.pth"


def test_the_order_is_that_of_the_steps(tmp_path):
    for step in (9, 100, 20):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-20", "checkpoint-9"]


def test_falls_back_to_the_one_before_with_a_warning(tmp_path):
    whole = write_checkpoint(tmp_path, 5)
    truncate(write_checkpoint(tmp_path, 10) / "optimizer.pt")
    with pytest.warns(UserWarning, match="checkpoint-10 is passed over: its optimizer.pt is cut off"):
        assert newest_complete(tmp_path) == whole


@pytest.mark.parametrize("value", [True, "True", "true", "yes"])
def test_true_is_the_newest(tmp_path, value):
    write_checkpoint(tmp_path, 5)
    newest = write_checkpoint(tmp_path, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint_to_resume(value, tmp_path) == newest


@pytest.mark.parametrize("value", [None, False, "False", "no", "none"])
def test_nothing_to_resume(tmp_path, value):
    write_checkpoint(tmp_path, 5)
    assert checkpoint_to_resume(value, tmp_path) is None


def test_a_folder_by_name(tmp_path):
    first = write_checkpoint(tmp_path, 5)
    write_checkpoint(tmp_path, 10)
    assert checkpoint_to_resume(str(first), tmp_path) == first
    truncate(first / "model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint-5': its model.safetensors is cut off; name an earlier"):
        checkpoint_to_resume(str(first), tmp_path)
    with pytest.raises(ValueError, match="there is no checkpoint folder 'nowhere'"):
        checkpoint_to_resume("nowhere", tmp_path)


def test_none_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint to resume from; leave --resume_from_checkpoint out"):
        checkpoint_to_resume(True, tmp_path)


@pytest.mark.parametrize("before, now", [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_another_number_of_processes_is_refused(tmp_path, before, now):
    folder = write_checkpoint(tmp_path, 5, ranks=before)
    for value in (True, str(folder)):
        with pytest.raises(ValueError, match=f"`num_processes` {before}, and this one has {now}; start {before},"):
            checkpoint_to_resume(value, tmp_path, now)
    with pytest.raises(ValueError, match=f"start {before}"):  # else a run would begin anew
        newest_complete(tmp_path, now)
    assert checkpoint_to_resume(True, tmp_path, before) == folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_interrupted_save_of_several_is_passed_over(ranks, tmp_path):
    whole, cut = (write_checkpoint(tmp_path, step, ranks=ranks) for step in (5, 6))
    (cut / "rng_state_1.pth").unlink()
    with pytest.warns(UserWarning, match="checkpoint-6 is passed over: it has no rng_state_1.pth"):
        assert newest_complete(tmp_path, ranks) == whole


def test_the_trainer_refuses_another_number_too(tmp_path):
    model = family("gpt2")["ForCausalLM"](config_class("gpt2")(**SHAPE, is_decoder=True))
    rows = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 4
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    XFormerTrainer(model=model, args=arguments, train_dataset=rows).train()
    checkpoint = tmp_path / "checkpoint-1"
    state = checkpoint / "rng_state.pth"
    for name in ("rng_state_0.pth", "rng_state_1.pth"):
        (checkpoint / name).write_bytes(state.read_bytes())
    state.unlink()
    with pytest.raises(ValueError, match="`num_processes` 2, and this one has 1; start 2,"):
        XFormerTrainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint=str(checkpoint))
