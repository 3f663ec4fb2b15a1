"""Every task from data to predictions, through the command."""

import pytest

from tests.finetuning.task_data import DATA, finetune, predictions


@pytest.mark.parametrize("task", list(DATA))
def test_a_task_runs_from_data_to_predictions(task, tmp_path):
    (tmp_path / "data").mkdir()
    summary = finetune(task, DATA[task](tmp_path / "data"), tmp_path / "run")
    assert summary["status"] == "finished" and summary["best_checkpoint"]
    rows = predictions(tmp_path / "run")
    assert len(rows) == summary["validation_rows"]
    assert (tmp_path / "run" / "model.safetensors").is_file() and (tmp_path / "run" / "tokenizer.json").is_file()
