"""`hf-xformers uptrain`: pretraining goes on after a swap, with a teacher or without, and resumes."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_xformers.cli import main
from tests.training.runs import SHAPE, history, pretrain, pretrain_flags, same_run, summary, weights


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    """A BERT trained for a few steps."""
    return pretrain(text, tmp_path_factory.mktemp("source") / "run", variant="bert", max_steps=6)


@pytest.fixture(scope="module")
def swapped(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swapped") / "model"
    argv = ["convert", "--from", source, "--to", folder, "--attention", "band_attention", "--attention.window", 2]
    assert main(list(map(str, [*argv, "--max-length", 32]))) == 0
    return folder


def uptrain(text, model, output, *extra, **options):
    defaults = {"model": model, **dict.fromkeys(SHAPE), "block_size": 16}
    return main(["uptrain", *pretrain_flags(text, output, **{**defaults, **options}), *map(str, extra)])


def test_on_its_own(text, swapped, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in swapped.iterdir()}
    assert uptrain(text, swapped, tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "variant a free mix: xf_bert with attention band_attention" in " ".join(captured.out.split())
    assert "uptrained" in captured.out and "objective mlm" in captured.err
    record = summary(tmp_path / "out")
    assert (record["status"], record["steps"], record["variant"]) == ("finished", 4, "xformer")
    assert record["init_from"] == str(swapped) and "distillation" not in record
    start, end = weights(swapped), weights(tmp_path / "out")
    assert start.keys() == end.keys() and any(not torch.equal(start[name], end[name]) for name in start)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention"]["type"] == "band_attention"
    assert {path.name: path.read_bytes() for path in swapped.iterdir()} == before


def test_with_a_teacher(text, source, swapped, tmp_path):
    assert uptrain(text, swapped, tmp_path / "out", teacher=source, hidden_weight=0.5, temperature=2) == 0
    entries = [entry for entry in history(tmp_path / "out") if "loss" in entry]
    assert all(entry["distill_logits"] > 0 and entry["distill_states"] > 0 for entry in entries)
    assert summary(tmp_path / "out")["distillation"]["teacher"] == str(source)
    # the model itself as teacher at the start: what it says is what it is told
    assert uptrain(text, source, tmp_path / "same", teacher=source, max_steps=1, logging_steps=1, weight_decay=0) == 0
    first = next(entry for entry in history(tmp_path / "same") if "loss" in entry)
    assert first["distill_logits"] < 0.1  # dropout alone


def test_resume(text, source, swapped, tmp_path):
    options = {"teacher": source, "save_strategy": "steps", "save_steps": 2, "hidden_weight": 0.1}
    assert uptrain(text, swapped, tmp_path / "whole", **options) == 0
    cut = tmp_path / "cut"
    assert uptrain(text, swapped, cut, **options) == 0
    shutil.rmtree(cut / "checkpoint-4")
    assert uptrain(text, swapped, cut, "--resume_from_checkpoint", **options) == 0
    same_run(cut, tmp_path / "whole")


REFUSED = {
    "no model": ({"model": "nowhere"}, "holds no config.json"),
    "no teacher": ({"teacher": "./nowhere"}, "There is no folder './nowhere'"),
    "temperature": ({"temperature": 0}, "--temperature must be above 0"),
    "objective": ({"objective": "clm"}, "of the shape that mlm trains; leave it out"),
    "unknown objective": ({"objective": "clmm"}, "unknown objective 'clmm'"),
    "length": ({"block_size": 64}, "covers only 32"),
    "teacher too short": ({"block_size": 32, "teacher": "SHORT"}, "too long for the teacher"),
    "teacher of other tokens": ({"teacher": "OTHER"}, "reads other tokens than the student ("),
    "unknown option": ({"techer": "x"}, "Did you mean --teacher?"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, text, source, swapped, tmp_path, capsys):
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    if options.get("teacher") == "SHORT":
        argv = ["convert", "--from", source, "--to", tmp_path / "short", "--max-length", 20]
        assert main(list(map(str, argv))) == 0
        options = {**options, "teacher": tmp_path / "short"}
    if options.get("teacher") == "OTHER":
        other = shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoint-*"))
        words = json.loads((other / "tokenizer.json").read_text())
        ids = words["model"]["vocab"]
        last, before = sorted(ids, key=ids.get)[:-3:-1]
        ids[last], ids[before] = ids[before], ids[last]
        words["model"]["merges"] = [
            merge for merge in words["model"]["merges"] if "".join(merge) not in (last, before)
        ]
        (other / "tokenizer.json").write_text(json.dumps(words))
        options = {**options, "teacher": other}
    code = uptrain(text, options.pop("model", swapped), tmp_path / "out", **options)
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in error and "Traceback" not in error


def test_a_teacher_is_not_replaced(text, source, swapped, tmp_path, capsys):
    teacher = shutil.copytree(source, tmp_path / "teacher")
    assert uptrain(text, swapped, teacher, teacher=teacher, overwrite_output_dir=True) == 2
    assert "would replace --teacher" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("objective, head", [("mlm", "ForMaskedLM"), ("contrastive", "ForTextContrast")])
def test_a_model_without_a_head(objective, head, text, swapped, tmp_path, capsys):
    """It gets the objective's, which is said before anything is prepared; the rest starts as it was."""
    bare = tmp_path / "bare"
    model = AutoModel.from_pretrained(swapped)
    model.save_pretrained(bare)
    AutoTokenizer.from_pretrained(swapped).save_pretrained(bare)
    assert uptrain(text, bare, tmp_path / "out", objective=objective, learning_rate=0, weight_decay=0) == 0
    said = capsys.readouterr().err
    assert f"has no trained head {head}" in said and said.index("start untrained") < said.index("rows of")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [f"XFormer{head}"]
    end = weights(tmp_path / "out")
    start = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if not name.startswith("pooler")}
    assert start.keys() <= end.keys() and all(torch.equal(end[name], start[name]) for name in start)
    new = summary(tmp_path / "out")["new_head"]
    assert new and not set(new) & set(start) and set(new) <= set(end) - set(start)


def test_a_teacher_without_a_head(text, source, tmp_path, capsys):
    AutoModel.from_pretrained(source).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "bare")
    assert uptrain(text, source, tmp_path / "out", teacher=tmp_path / "bare") == 2
    assert "so that its predictions are noise" in capsys.readouterr().err
    options = {"teacher": tmp_path / "bare", "logit_weight": 0, "hidden_weight": 1, "max_steps": 1}
    assert uptrain(text, source, tmp_path / "out", **options) == 0


def test_the_value_before_stands_beside_the_one_after(text, swapped, tmp_path, capsys):
    """It is that of a run that learns nothing."""
    assert uptrain(text, swapped, tmp_path / "out", learning_rate=0.01) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert uptrain(text, swapped, tmp_path / "still", learning_rate=0) == 0
    moved, still = summary(tmp_path / "out"), summary(tmp_path / "still")
    assert moved["start_loss"] == pytest.approx(still["eval_loss"]) != pytest.approx(moved["eval_loss"])
    assert f"held-out loss before {moved['start_loss']:.4g} held-out loss {moved['eval_loss']:.4g}" in said
    assert f"held-out accuracy before {moved['start_accuracy']:.1%}" in said
