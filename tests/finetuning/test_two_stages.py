"""An intermediate task before the target task: what the second stage starts from, resuming in either, refusals."""

import json
import shutil

import pytest
import torch

import hf_xformers.cli
from hf_xformers.finetuning import loading
from hf_xformers.finetuning.two_stages import save_encoder
from tests.finetuning.task_data import (
    BARE,
    classification,
    command,
    finetune,
    language,
    pretrained,
    sentences,
    tagging,
)
from tests.training.runs import cut_after, same_weights, weights

SAVES = {**BARE, "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files of a tagging and of a classification, and a pretrained encoder with its tokenizer."""
    folder = tmp_path_factory.mktemp("stages")
    for name in ("tags", "classes", "texts"):
        (folder / name).mkdir()
    return {
        "tags": tagging(folder / "tags", count=32)[0],
        "classes": classification(folder / "classes", count=32),
        "texts": language(folder / "texts")[0],
        "bert": pretrained(folder / "bert"),
    }


def two(places, output, *extra, **options):
    options = {"model": places["bert"], "max_steps": 4, "intermediate_task": "tagging", **SAVES, **options}
    options.setdefault("intermediate_data", places["tags"])
    return finetune("text-classification", places["classes"], output, *extra, **options)


@pytest.fixture(scope="module")
def run(places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, two(places, folder)


def test_the_second_stage_starts_from_the_first_encoder(run, places):
    folder, summary = run
    first = weights(folder / "intermediate")
    start = weights(folder / "intermediate" / "encoder")
    before = weights(places["bert"])
    assert not any("classifier" in name or "pooler" in name for name in start)
    for name, value in start.items():
        inside = f"model.{name}"
        assert torch.equal(value, first[inside]) and inside in before
    assert any(not torch.equal(value, before[f"model.{name}"]) for name, value in start.items())
    assert summary["intermediate"]["task"] == "token-classification" and summary["intermediate"]["steps"] == 4
    assert summary["task"] == "text-classification" and summary["steps"] == 4
    # As a run by itself from that encoder: the same head at the start, optimizer and schedule from the beginning.
    saved = json.loads((folder / "intermediate" / "training_summary.json").read_text())
    assert saved["status"] == "finished" and saved["train_rows"] == 32


def test_it_is_two_runs(run, places, tmp_path):
    folder, _ = run
    encoder = folder / "intermediate" / "encoder"
    finetune("text-classification", places["classes"], tmp_path / "own", model=encoder, max_steps=4, **SAVES)
    same_weights(folder, tmp_path / "own")


def test_a_first_stage_that_learns_nothing_is_none(places, tmp_path):
    """With a rate of nearly 0 the target task is learned as from the model itself, the head included."""
    two(places, tmp_path / "two", intermediate_learning_rate=1e-30, weight_decay=0)
    options = {**SAVES, "model": places["bert"], "max_steps": 4, "weight_decay": 0}
    finetune("text-classification", places["classes"], tmp_path / "one", **options)
    same_weights(tmp_path / "two", tmp_path / "one")


def test_a_head_is_new_even_of_the_same_kind(places, tmp_path):
    """Labels of an intermediate classification are not those of the next one."""
    path = tmp_path / "other.tsv"
    path.write_text("".join(f"{text}\tc{n % 3}\n" for n, (text, _) in enumerate(sentences(24, 3))))
    columns = ["--intermediate_column_names", "text", "label"]  # of a file without a header line
    summary = two(places, tmp_path / "run", *columns, intermediate_task="classification", intermediate_data=path)
    assert summary["labels"] == ["0", "1"] and summary["intermediate"]["task"] == "text-classification"
    encoder = tmp_path / "run" / "intermediate" / "encoder"
    assert not loading.has_head(loading.open_config(str(encoder)), "SequenceClassification")


def test_more_pretraining_first(places, tmp_path):
    summary = two(places, tmp_path / "run", intermediate_task="language-modeling", intermediate_data=places["texts"],
                  max_length=16, intermediate_epochs=1)  # fmt: skip
    assert summary["intermediate"]["epochs"] == 1.0 and summary["steps"] == 4


@pytest.mark.parametrize("stage, interrupted", [(1, []), (1, ["trainer_state.json"]), (2, [])])
def test_resuming_in_either_stage(stage, interrupted, run, places, tmp_path):
    folder, _ = run
    cut = cut_after(2 * (stage - 1), folder, tmp_path / "cut")
    if stage == 1:
        shutil.rmtree(cut / "intermediate" / "encoder")
        shutil.rmtree(cut / "intermediate" / "checkpoint-4")
        for name in interrupted:
            (cut / "intermediate" / "checkpoint-2" / name).unlink()
        (cut / "intermediate" / "model.safetensors").unlink()
    again = two(places, cut, "--resume_from_checkpoint")
    assert again["steps"] == 4
    for place in (".", "intermediate", "intermediate/encoder"):
        same_weights(cut / place, folder / place)


def test_encoder_of_another_family(tmp_path):
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=1)
    model = BertForTokenClassification(config)
    model.save_pretrained(tmp_path)
    save_encoder(tmp_path, tmp_path / "encoder")
    found, whole = weights(tmp_path / "encoder"), model.bert.state_dict()
    assert found and all(torch.equal(value, whole[name]) for name, value in found.items())
    assert not any("pooler" in name for name in found)


REFUSED = [
    ({"intermediate_data": None}, "--intermediate_task tagging needs rows of its own; give --intermediate_data"),
    ({"intermediate_task": None}, "--intermediate_data is of an intermediate task; name it"),
    ({"intermediate_task": "taging"}, "unknown task 'taging'"),
    ({"intermediate_steps": 2, "intermediate_epochs": 1}, "both say how long; drop one"),
    ({"intermediate_steps": 0}, "--intermediate_steps 0 must be above 0"),
    ({"intermediate_label_column": "nothing"}, "there is no column 'nothing'"),
    ({"label_column": "nothing"}, "there is no column 'nothing'"),
    ({"intermediate_data": "./nowhere"}, "there is no"),
    ({"resume_from_checkpoint": True}, "holds no intermediate stage to resume"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_refusals(options, message, places, tmp_path, capsys):
    given = {"model": places["bert"], "intermediate_task": "tagging", "intermediate_data": places["tags"], **options}
    argv = command("text-classification", places["classes"], tmp_path / "run", **given)
    assert hf_xformers.cli.main(["finetune", *argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_another_first_stage_is_not_resumed(run, places, tmp_path, capsys):
    shutil.copytree(run[0], tmp_path / "cut")
    given = {"model": places["bert"], "intermediate_task": "regression", "intermediate_data": places["tags"], **SAVES}
    argv = command("text-classification", places["classes"], tmp_path / "cut", **given, resume_from_checkpoint=True)
    assert hf_xformers.cli.main(["finetune", *argv]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "had task 'token-classification', and this command gives 'regression'" in said
