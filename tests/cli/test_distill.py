"""`hf-xformers distill`: runs of every method, resumes, and what is refused."""

import contextlib
import importlib.util
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, TrainerCallback, TrainingArguments

from hf_xformers import XFormerForCausalLM
from hf_xformers.cli import main
from hf_xformers.cli.distill import run
from hf_xformers.compression.distillation import FILE, STUDENT, Distiller
from hf_xformers.compression.distilling_options import Distilling
from hf_xformers.compression.pruning import Pruner, Pruning
from hf_xformers.compression.report import Measuring
from hf_xformers.compression.students import StudentChoice
from hf_xformers.hub.training_record import read_record
from hf_xformers.training.earlier_stages import put_aside
from hf_xformers.training.text import TextData
from tests.compression.test_methods import make
from tests.finetuning.task_data import classification, finetune, tagging, translation
from tests.training.runs import flags, pretrain, summary, weights

FAST = {"disable_tqdm": "true", "use_cpu": True, "time_batches": 1, "per_device_train_batch_size": 8}
BARE = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": "false"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def teacher(rows, tmp_path_factory):
    """A classifier of four layers that has learned its task."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    options = {"num_hidden_layers": 4, "num_train_epochs": 12, "learning_rate": 3e-3, "save_strategy": "no"}
    finetune("text-classification", rows, folder, load_best_model_at_end="false", **options)
    return folder


def arguments(teacher, data, output, *extra, **options):
    data = [str(part) for part in (data if isinstance(data, list) else [data])]
    defaults = {**FAST, "teacher": teacher, "output_dir": output}
    return [*flags(**{**defaults, **options}), "--data", *data, *extra]


def distill(teacher, data, output, *extra, callbacks=(), **options):
    assert run(arguments(teacher, data, output, *extra, **options), callbacks) == 0
    return output


@pytest.mark.parametrize("method", ["distilbert", "pkd", "tinybert", "mobilebert", "theseus"])
def test_a_classifier(method, teacher, rows, tmp_path, capsys):
    """Half the layers keep what the teacher knows, and the folder is a model like any other."""
    learns = method in ("distilbert", "theseus")
    options = {**BARE, "learning_rate": 2e-3, **({"num_train_epochs": 8} if learns else {"max_steps": 3})}
    out = distill(teacher, rows, tmp_path / "out", method=method, logging_steps=1, **options)
    shown = " ".join(capsys.readouterr().out.split())
    assert "before and after" in shown and "size on disk" in shown
    step = json.loads((out / "compression.json").read_text())["steps"][-1]
    assert step["command"] == "distill" and step["after"]["parameters"] < step["before"]["parameters"]
    assert not learns or step["after"]["quality"] >= step["after"]["baseline"] + 0.2
    assert not any("distillation" in name for name in weights(out))
    facts = read_record(out).facts  # of its card: what the run starts from is the teacher's
    assert facts["teacher"] == teacher.name and "started from" not in facts
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_hidden_layers == 2 and model.config.id2label == {0: "0", 1: "1"}
    assert summary(out)["parameters"] == model.num_parameters()
    assert main(["evaluate", "--model", str(out), "--use_cpu", "--no_progress"]) == 0
    assert "accuracy" in capsys.readouterr().out
    if method == "pkd" and importlib.util.find_spec("torchao") is not None:  # the commands go one after the other
        command = ["quantize", "--model", str(out), "--output_dir", str(tmp_path / "small"), "--use_cpu"]
        assert main([*command, "--time_batches", "0", "--weights", "int8"]) == 0
        steps = json.loads((tmp_path / "small" / "compression.json").read_text())["steps"]
        assert [step["command"] for step in steps] == ["distill", "quantize"]
        assert steps[1]["after"]["quality"] >= steps[0]["after"]["quality"] - 0.1


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedError


@pytest.mark.parametrize("method", ["tinybert", "theseus"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(method, teacher, rows, tmp_path):
    """With a narrower student, whose learned maps are in the checkpoints, and with layers that are drawn."""
    options = {**BARE, "method": method, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    options |= {"student.hidden_size": 8} if method == "tinybert" else {}
    whole = distill(teacher, rows, tmp_path / "whole", **options)
    cut = tmp_path / "cut"
    for step in (1, 5):
        with pytest.raises(InterruptedError):
            extra = ["--resume_from_checkpoint"] if step > 1 else []
            distill(teacher, rows, cut, *extra, callbacks=[Stop(step)], **options)
    distill(teacher, rows, cut, "--resume_from_checkpoint", **options)
    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="holds a distillation already"):
        distill(teacher, rows, cut, **options)
    with pytest.raises(ValueError, match="had method"):
        distill(teacher, rows, cut, "--resume_from_checkpoint", **{**options, "method": "pkd"})


@pytest.mark.parametrize("method", ["distilbert", "pkd"])
def test_stored_outputs_teach_the_same(method, teacher, rows, tmp_path):
    """The teacher has no dropout, so that what it says of a row is the same every time. (Adam would turn a rounded
    gradient near zero into a whole step.)"""
    options = {**BARE, "method": method, "max_steps": 3, "optim": "sgd", "logging_steps": 1}
    live = distill(teacher, rows, tmp_path / "live", **options)
    stored = distill(teacher, rows, tmp_path / "stored", store_teacher=True, **options)
    assert list((stored / "teacher_outputs").glob("rows-*.safetensors"))
    one, other = weights(live), weights(stored)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_tags_another_family_and_half_precision(tmp_path):
    data = tagging(tmp_path)
    teacher = tmp_path / "teacher"
    finetune("token-classification", data, teacher, num_train_epochs=2)
    options = {"student": "linformer", "student.num_hidden_layers": 1, "teacher_dtype": "bfloat16"}
    out = distill(teacher, data, tmp_path / "out", store_teacher=True, num_train_epochs=1, **options)
    assert summary(out)["variant"] == "xf_linformer" and summary(out)["distillation"]["teacher"] == str(teacher)


def test_text(tmp_path_factory, tmp_path, capsys):
    from tests.training.runs import write_text

    text = write_text(tmp_path / "text.txt")
    teacher = pretrain(text, tmp_path / "teacher", variant="bert", num_hidden_layers=2, max_steps=6)
    options = {"max_steps": 4, "block_size": 12, "save_strategy": "no", "logging_steps": 1, "validation_fraction": 0.2}
    out = distill(teacher, text, tmp_path / "out", method="minilm", **{**options, "student.hidden_size": 8})
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert any("distill_values" in entry for entry in history)
    assert "loss" in capsys.readouterr().out and not any("projection" in name for name in weights(out))
    step = json.loads((out / "compression.json").read_text())["steps"][-1]  # the teacher read blocks of another size
    read = [{name: step[when]["figures"][name] for name in ("rows", "tokens")} for when in ("before", "after")]
    assert read[0] == read[1] and step["after"]["figures"]["block_size"] == 12
    gpt = pretrain(text, tmp_path / "gpt", variant="gpt2", objective="clm", num_hidden_layers=2, max_steps=6)
    capsys.readouterr()
    written = {"method": "sequence_level", "method.num_beams": 1, "method.prompt_tokens": 4}
    out = distill(gpt, text, tmp_path / "written", **written, **options)
    lines = (out / "teacher_texts.jsonl").read_text().splitlines()
    assert len(lines) == summary(out)["train_rows"] and all(len(json.loads(line)) == 12 for line in lines)


def test_translations_of_the_teacher(tmp_path):
    data = translation(tmp_path)
    teacher = tmp_path / "teacher"
    finetune("translation", data, teacher, num_train_epochs=1, source_lang="en", target_lang="xx")
    options = {"method": "sequence_level", "method.num_beams": 2, "num_train_epochs": 1}
    out = distill(teacher, data, tmp_path / "out", **options)
    assert len((out / "teacher_texts.jsonl").read_text().splitlines()) == 64


def test_the_teacher_computes_with_the_numbers_that_are_asked_for(tmp_path):
    """By default in float32, however it is saved."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    distiller = Distiller(Distilling(teacher="it"), "distilbert", TextData(), args)
    model = make(XFormerForCausalLM, is_decoder=True).bfloat16()
    model.generation_config.no_repeat_ngram_size = 3  # its texts are those that it writes by itself
    found = distiller._in_dtype(model)
    assert found.dtype == torch.float32 and found.generation_config.no_repeat_ngram_size == 3


@pytest.mark.parametrize("given", [{}, {"size": "base"}])
def test_what_a_student_is_made_of_is_not_replaced(given, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    choice, made = Distilling(teacher="it", **given), StudentChoice(start="bert", copy_layers="last", size="tiny")
    student = Distiller(choice, "distilbert", TextData(), args, student=made).student
    assert (student.start, student.copy_layers, student.size) == ("bert", "last", "tiny")
    choice = Distilling(teacher="it", copy_layers="first")
    assert Distiller(choice, "distilbert", TextData(), args).student.copy_layers == "first"


def test_several_processes_are_refused(tmp_path):
    """All but one would wait for what is measured, or be waited for."""
    args = SimpleNamespace(world_size=2, output_dir=str(tmp_path), resume_from_checkpoint=None)
    for make_one in (
        lambda: Distiller(Distilling(teacher="it"), "distilbert", TextData(), args),
        lambda: Pruner(Pruning(model="it", method="layers"), Measuring(), args),
    ):
        with pytest.raises(ValueError, match="and this is one of 2; start the command without a launcher"):
            make_one()


@pytest.mark.parametrize("by, refused", [("movement", True), ("magnitude", False)])
def test_several_gpus_of_one_process_are_refused_in_training(by, refused, tmp_path):
    """Trainer's copies of the model would lack what stands around the layers."""
    args = SimpleNamespace(
        world_size=1, n_gpu=2, output_dir=str(tmp_path), resume_from_checkpoint=None, use_cpu=False, should_save=True
    )
    with pytest.raises(ValueError, match="this process sees 2; set CUDA_VISIBLE_DEVICES=0"):
        Distiller(Distilling(teacher="it"), "distilbert", TextData(), args)
    choice = Pruning(model="it", method="weights", by=by)
    with pytest.raises(ValueError, match="sees 2") if refused else contextlib.nullcontext():
        Pruner(choice, Measuring(), args)


REFUSED = {
    "no teacher": ({"teacher": "nowhere"}, "nowhere"),
    "method": ({"method": "distillbert"}, "Did you mean 'distilbert'"),
    "field": ({"method.heat": 1}, "Unknown field 'heat'"),
    "layers": ({"copy_layers": "0,9"}, "names layer 9"),
    "no task loss": ({"method": "minilm"}, "give --method.task_weight 1"),
    "attention": (
        {"method": "tinybert", "student.attention": "performer"},
        "under a softmax, which attention 'performer' of the student",
    ),
    "stored": ({"method": "tinybert", "store_teacher": True}, "--store_teacher keeps predictions and states"),
    "stored texts": (
        {"task": "translation", "method.cosine_weight": 0, "store_teacher": True},
        "predictions are as many numbers as the vocabulary has",
    ),
    "stored choices": ({"task": "multiple-choice", "store_teacher": True}, "keeps the states of one text of each row"),
    "width": ({"method": "theseus", "student.hidden_size": 8}, "student has width 8"),
    "replaced numbers": ({"method": "theseus", "teacher_dtype": "bfloat16"}, "--teacher_dtype bfloat16: method"),
    "written": ({"method": "sequence_level"}, "trains on texts that the teacher writes"),
    "student": ({"student": "berd"}, "neither 'teacher', 'scratch', a folder, nor a variant"),
    "student's field": ({"student.layers": 3}, "there is no --student.layers"),
    "student's vocabulary": ({"student.vocab_size": 9}, "read or say something else"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "both soften what is predicted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, teacher, rows, tmp_path, capsys):
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    code = main(["distill", *arguments(options.pop("teacher", teacher), rows, tmp_path / "out", **options)])
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()


def test_a_student_with_another_vocabulary(teacher, rows, tmp_path, capsys):
    other = tmp_path / "other"
    finetune("text-classification", rows, other, vocab_size=280, max_steps=1, tokenizer_type="wordpiece")
    code = main(["distill", *arguments(teacher, rows, tmp_path / "out", student=other)])
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "has another vocabulary than the teacher" in error and "--student teacher" in error
    assert not (tmp_path / "out").exists()
    options = {"student": other, "method.cosine_weight": 0, "method.task_weight": 0, "max_steps": 2}
    out = distill(teacher, rows, tmp_path / "out", **BARE, **options, store_teacher=True)
    stored = load_file(next((out / "teacher_outputs").glob("rows-*.safetensors")))
    labels = [int(line.rpartition(",")[2]) for line in open(rows[0]).read().splitlines()[1:]]
    right = [int(stored[f"{row}.logits"].argmax()) == label for row, label in enumerate(labels)]
    assert sum(right) > 0.9 * len(labels)  # what the teacher says of each row, in its own tokens
    assert (out / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_both_are_measured_on_the_rows_of_the_run(teacher, rows, tmp_path):
    few = tmp_path / "few.csv"
    few.write_text("".join(open(rows[1]).readlines()[:6]))
    out = distill(teacher, rows, tmp_path / "out", **BARE, max_steps=1, test_data=few)
    step = json.loads((out / "compression.json").read_text())["steps"][-1]
    assert all((5 * step[when]["baseline"]) % 1 == 0 for when in ("before", "after"))  # of all 24 rows it is 14/24


def test_what_is_read_is_not_replaced(teacher, rows, tmp_path, capsys):
    """By its student, nor where it is a folder that the run makes anew."""
    before = weights(teacher)
    assert main(["distill", *arguments(teacher, rows, teacher)]) == 2
    assert "would replace --teacher" in capsys.readouterr().err
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(teacher).items())
    student = tmp_path / STUDENT
    shutil.copytree(teacher, student)
    assert main(["distill", *arguments(student, rows, tmp_path)]) == 2
    assert "would replace --teacher" in capsys.readouterr().err and (student / "model.safetensors").is_file()


def test_what_is_overwritten_is_kept_until_nothing_is_refused(teacher, rows, tmp_path, capsys):
    """An end before the first step leaves the earlier distillation as it was."""
    out = distill(teacher, rows, tmp_path / "out", **BARE, max_steps=1, max_eval_rows=5)
    step = json.loads((out / "compression.json").read_text())["steps"][-1]
    assert all((5 * step[when]["baseline"]) % 1 == 0 for when in ("before", "after"))  # of all 24 rows it is 14/24
    before = {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    put_aside(out, FILE, (STUDENT,))  # as a run does that is killed while it prepares its rows
    (out / STUDENT).mkdir()
    assert main(["distill", *arguments(teacher, rows, out)]) == 2
    assert "holds a distillation already" in capsys.readouterr().err
    assert {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("no space left")])
def test_a_first_distillation_that_was_stopped_starts_again(stop, tmp_path, monkeypatch):
    """What it has made goes, and what is of no distillation is neither taken for that nor removed."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    distiller = Distiller(Distilling(teacher="it"), "distilbert", TextData(), args)
    built = SimpleNamespace(model=make(XFormerForCausalLM, is_decoder=True), tokenizer=None, made="it")
    monkeypatch.setattr(distiller, "_built", lambda teacher: built)
    teacher = SimpleNamespace(tokenizer=SimpleNamespace(save_pretrained=lambda folder: None))
    with pytest.raises((KeyboardInterrupt, OSError)), distiller._student(teacher):
        raise stop
    assert (tmp_path / STUDENT).is_dir()
    distiller._open()
    assert not any(tmp_path.iterdir())
    (tmp_path / "teacher_texts.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="is there already and of no distillation"):
        distiller._open()
    assert (tmp_path / "teacher_texts.jsonl").read_text() == "mine"
