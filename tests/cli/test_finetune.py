"""Malformed requests to `hf-xformers finetune`: refused in one paragraph with the remedy, before anything is
written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    TrainerCallback,
)

from hf_xformers.cli import main
from hf_xformers.cli.finetune import run as finetune_run
from hf_xformers.finetuning import loading
from tests.finetuning.task_data import (
    BARE,
    classification,
    command,
    finetune,
    pretrained,
    sentences,
    summarization,
    tagging,
    translation,
    write_lines,
)
from tests.refused import refused


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("classification"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def classifier(bert, data, tmp_path_factory):
    """The encoder fine-tuned on two classes."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    finetune("text-classification", data, folder, model=bert, max_steps=1, **BARE)
    return folder


REQUESTS = {
    "no start": ({"variant": None}, ["give either --model", "or --variant"]),
    "both starts": ({"model": "m", "variant": "bert"}, ["give either --model"]),
    "unknown variant": ({"variant": "brt"}, ["Unknown variant 'brt'", "Did you mean 'bert'"]),
    "unknown size": ({"size": "huge"}, ["unknown size 'huge'"]),
    "unknown task": ({"task": "text-clasification"}, ["unknown task", "Did you mean 'text-classification'?"]),
    "variant without the head": (
        {"task": "translation", "variant": "bert", "source_lang": "en", "target_lang": "de"},
        ["'xf_bert' has no ForSeq2SeqLM class", "xf_t5"],
    ),
    "metric that is not measured": (
        {"metric_for_best_model": "bleu"},
        ["'bleu' is not measured; choose one of loss, accuracy, f1"],
    ),
    "too long rows": (
        {"max_length": 600, "max_position_embeddings": 100},
        ["--max_length 600 is more than the 100 tokens", "take at most 100"],
    ),
    "negative rate": ({"learning_rate": -1}, ["--learning_rate -1 must be a number of at least 0"]),
    "option of another task": (
        {"doc_stride": 5},
        ["--doc_stride 5 means nothing to text-classification; it is for question-answering; leave it out"],
    ),
    "option of other tasks": (
        {"target_lang": "de"},
        ["--target_lang 'de' means nothing to text-classification; it is for translation; leave it out"],
    ),
    "window without a teacher": (
        {"teacher_window": 3},
        ["--teacher_window 3 has no effect without --self_ensemble; give both"],
    ),
    "share without its schedule": (
        {"cut_frac": 0.2},
        ["--cut_frac 0.2 has no effect without --slanted_triangular; give both"],
    ),
    "threshold without patience": (
        {"early_stopping_threshold": 0.1},
        ["--early_stopping_threshold 0.1 has no effect without --early_stopping_patience; give both"],
    ),
    "no length": ({"max_length": 0}, ["--max_length 0 must be at least 1"]),
    "patience": ({"early_stopping_patience": 0}, ["--early_stopping_patience 0 must be at least 1"]),
    "patience without evaluations": (
        {"early_stopping_patience": 1, "eval_strategy": "no", "load_best_model_at_end": "false"},
        ["--early_stopping_patience counts evaluations, and --eval_strategy is no"],
    ),
    "patience without validation": (
        {"early_stopping_patience": 1, "validation_fraction": 0, "one_file": True},
        ["needs validation rows; raise --validation_fraction above 0"],
    ),
    "column": ({"label_column": "lable"}, ["there is no column 'lable'", "['text', 'label']", "--label_column"]),
    "two tokenizers": ({"tokenizer": "t", "train_tokenizer": True}, ["exclude each other"]),
    "type of a tokenizer that is there": (
        {"tokenizer": "t", "tokenizer_type": "wordpiece"},
        ["--tokenizer_type wordpiece has no effect without --train_tokenizer; give both"],
    ),
    "tokenizer": ({"tokenizer": "./nowhere"}, ["no tokenizer could be loaded from './nowhere'"]),
    "adapter without a model": ({"peft": "lora"}, ["--variant starts from random weights; give a --model"]),
    "fields without a method": ({"peft.r": 4}, ["--peft.FIELD options are about a method; name it with --peft"]),
    "unknown option": ({"lerning_rate": 1}, ["Did you mean --learning_rate?"]),
    "missing file": ({"validation_data": "nowhere.csv"}, ["there is no file or folder 'nowhere.csv'"]),
    "sampling of one": ({"sampling": "sqrt"}, ["--sampling says how often each of several tasks comes"]),
    "no text to learn from": (
        {"task": "language-modeling", "max_train_rows": 0},
        ["--max_train_rows 0 must be at least 1"],
    ),
    "names of the columns of texts": (
        {"task": "language-modeling", "column_names": "text"},
        ["from the header line of a file", "leave --column_names out"],
    ),
    "smoothed regression": (
        {"task": "regression", "label_smoothing_factor": 0.1},
        ["--label_smoothing_factor spreads probability over classes"],
    ),
    "smoothed forecasts": (
        {"task": "forecasting", "variant": "informer", "label_smoothing_factor": 0.1},
        ["of which one is right, and forecasting has none"],
    ),
    "batches by tokens of what has none": (
        {"task": "forecasting", "variant": "informer", "max_tokens": 64},
        ["--max_tokens counts tokens of texts, and forecasting reads none"],
    ),
    "no token to write": (
        {"task": "summarization", "variant": "bart", "generation_max_length": 1},
        ["--generation_max_length 1 counts the token that begins a text"],
    ),
}


@pytest.mark.parametrize("case", list(REQUESTS))
def test_requests(case, data, tmp_path, capsys):
    options, words = REQUESTS[case]
    files = data[:1] if options.pop("one_file", False) else data
    message = refused(capsys, "finetune", *command("text-classification", files, tmp_path / "run", **options))
    for word in words:
        assert word in message
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_no_output_folder_and_no_task(data, capsys):
    assert "--output_dir" in refused(capsys, "finetune", "--task", "regression", "--variant", "bert", "--data", *data)
    assert "--task" in refused(capsys, "finetune", "--variant", "bert", "--data", *data, "--output_dir", "x")


# ------------------------------------------------------------------------------------------------ data


def test_a_csv_without_the_label_column(tmp_path, capsys):
    path = tmp_path / "train.csv"
    path.write_text("text,other\na day,1\nthe film,0\n")
    message = refused(capsys, "finetune", *command("text-classification", [str(path)], tmp_path / "run"))
    assert "no column is the label" in message and "['text', 'other']" in message
    assert "--label_column" in message and "--column_names" in message
    path = tmp_path / "train.tsv"  # no header: the first row would be taken for one
    path.write_text("a day\t1\nthe film\t0\nit was\t0\n")
    message = refused(capsys, "finetune", *command("text-classification", [str(path)], tmp_path / "run"))
    assert "['a day', '1']" in message and "--column_names" in message


@pytest.mark.parametrize("empty", ["", "text,label\n"])
def test_an_empty_split(empty, data, tmp_path, capsys):
    path = tmp_path / "dev.csv"
    path.write_text(empty)
    message = refused(capsys, "finetune", *command("text-classification", [data[0], str(path)], tmp_path / "run"))
    assert "dev.csv" in message and ("header line and no rows" if empty else "empty (0 bytes)") in message
    assert "leave it out" in message


@pytest.mark.parametrize(
    "rows, words",
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "the one label 'x'; a classifier needs two"),
        ([{"text": "a", "label": 0.5}, {"text": "b", "label": 1.0}], "0.5 is no class label"),
        ([{"text": "a", "label": None}, {"text": "b", "label": 1}], "None is no class label"),
        ([{"text": "a", "label": " "}, {"text": "b", "label": "x"}], "' ' is no class label"),
        ([{"text": None, "label": 0}, {"text": "b", "label": 1}], "row 0 of the train split has no text"),
        (
            [{"text": {"body": "a"}, "label": 0}, {"text": {"body": "b"}, "label": 1}],
            "row 0 of the train split has {'body': 'a'} in column 'text', which is no text",
        ),
    ],
)
def test_rows_of_classification(rows, words, tmp_path, capsys):
    path = write_lines(tmp_path / "train.jsonl", rows)
    options = {"validation_fraction": 0}
    assert words in refused(
        capsys, "finetune", *command("text-classification", [str(path)], tmp_path / "run", **options)
    )


def test_a_label_that_only_the_validation_rows_have(data, tmp_path, capsys):
    path = tmp_path / "dev.csv"
    path.write_text("text,label\na day,7\n")
    message = refused(capsys, "finetune", *command("text-classification", [data[0], str(path)], tmp_path / "run"))
    assert "row 0 of the validation split has the label '7', which the training rows do not have (0, 1)" in message


def test_damaged_conll_and_unequal_parallel_files(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    tagging(tmp_path / "a")
    with (tmp_path / "a" / "train.conll").open("a") as file:
        file.write("word\n")
    message = refused(capsys, "finetune", *command("token-classification", [str(tmp_path / "a")], tmp_path / "run"))
    assert "is 'word', without a tag" in message and "line " in message
    (tmp_path / "b").mkdir()
    translation(tmp_path / "b")
    with (tmp_path / "b" / "val.en").open("a") as file:
        file.write("one more\n")
    message = refused(capsys, "finetune", *command("translation", [str(tmp_path / "b")], tmp_path / "run"))
    assert "must have a line for each other's lines" in message and "val.en' has 17 and " in message


def test_answers_that_are_not_in_their_context(tmp_path, capsys):
    answers = {"text": ["day"], "answer_start": [3]}
    path = write_lines(tmp_path / "t.jsonl", [{"question": "q", "context": "a day", "answers": answers}] * 3)
    message = refused(
        capsys, "finetune", *command("question-answering", [str(path)], tmp_path / "run", validation_fraction=0)
    )
    assert "row 0 of the train split has the answer 'day', which does not stand in its context" in message


def test_a_stride_that_leaves_no_room(tmp_path, capsys):
    answers = {"text": ["day"], "answer_start": [2]}
    path = write_lines(tmp_path / "t.jsonl", [{"question": "q", "context": "a day", "answers": answers}] * 3)
    options = {"validation_fraction": 0, "max_length": 16, "doc_stride": 16}
    message = refused(capsys, "finetune", *command("question-answering", [str(path)], tmp_path / "run", **options))
    assert "--doc_stride 16 of them are shared; take a smaller stride or longer windows" in message


def test_rows_that_nothing_could_be_said_of(tmp_path, capsys):
    test = write_lines(tmp_path / "test.jsonl", [{"document": "a day"}])
    options = {"test_data": test, "predict_with_generate": "false", "metric_for_best_model": "loss"}
    argv = command("summarization", summarization(tmp_path), tmp_path / "run", **options)
    assert "the test rows have no targets to measure with" in refused(capsys, "finetune", *argv)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ models


def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "copy")


@pytest.mark.parametrize("change", ["missing", "unexpected", "size"])
def test_tensors_that_do_not_fit(change, bert, data, tmp_path, capsys):
    model = copied(bert, tmp_path)
    tensors = load_file(model / "model.safetensors")
    name = "model.trunk.layers.1." + next(k for k in tensors if ".layers.1." in k).partition(".layers.1.")[2]
    if change == "missing":
        del tensors[name]
        words = f"has no weights for {name!r} (and 0 more); it is incomplete"
    elif change == "unexpected":
        tensors["model.trunk.layers.7.extra"] = torch.zeros(2)
        words = "has weights that the model has no place for: 'model.trunk.layers.7.extra'"
    else:
        tensors[name] = torch.zeros(3)
        words = "do not load into XFBertForSequenceClassification"
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert words in refused(capsys, "finetune", *command("text-classification", data, tmp_path / "run", model=model))


def test_a_saved_head_must_be_whole(classifier, data, tmp_path, capsys):
    model = copied(classifier, tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors["classifier.bias"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    message = refused(capsys, "finetune", *command("text-classification", data, tmp_path / "run", model=model))
    assert "has no weights for 'classifier.bias'" in message


def test_labels_unknown_to_the_config(classifier, tmp_path, capsys):
    rows = [{"text": text, "label": label + 1} for text, label in sentences(20, 0)]
    path = str(write_lines(tmp_path / "train.jsonl", rows))
    message = refused(capsys, "finetune", *command("text-classification", [path], tmp_path / "run", model=classifier))
    assert "the label '2', which the model's config does not know (it has 0, 1)" in message and "--new_head" in message
    options = {"model": classifier, "max_steps": 1}
    summary = finetune("text-classification", [path], tmp_path / "run", "--new_head", **options)
    assert summary["status"] == "finished"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["label2id"] == {"1": 0, "2": 1}


def test_a_head_of_another_task_is_left(classifier):
    """Its layer has the same name, and may have the same size."""
    saved = load_file(classifier / "model.safetensors")
    for head, labels in (("QuestionAnswering", 2), ("TokenClassification", 2), ("TokenClassification", 3)):
        config = AutoConfig.from_pretrained(classifier, num_labels=labels)
        model, new = loading.load_model(str(classifier), config, head, has_head=False, new_head=False)
        assert {"classifier.weight", "classifier.bias"} <= {*new}
        assert not torch.isin(model.classifier.weight, saved["classifier.weight"]).any()
        assert torch.equal(
            model.model.trunk.layers[0].attention.q_proj.weight, saved["model.trunk.layers.0.attention.q_proj.weight"]
        )

    class Own(type(AutoModelForSequenceClassification.from_pretrained(classifier))):
        """A class of a user's."""

    for auto, new in (
        (AutoModelForSequenceClassification, False),
        (Own, False),
        (AutoModelForQuestionAnswering, True),
    ):
        model, report = auto.from_pretrained(classifier, output_loading_info=True)
        assert ({"classifier.weight", "classifier.bias"} <= {*report["missing_keys"]}) is new
        assert torch.isin(model.classifier.weight, saved["classifier.weight"]).all() == (not new)


def test_a_model_without_a_tokenizer(bert, data, tmp_path, capsys):
    model = copied(bert, tmp_path)
    for path in model.glob("tokenizer*"):
        path.unlink()
    message = refused(capsys, "finetune", *command("text-classification", data, tmp_path / "run", model=model))
    assert "comes without a tokenizer" in message and "--tokenizer" in message and "--train_tokenizer" in message
    assert finetune("text-classification", data, tmp_path / "run", "--train-tokenizer", model=model, max_steps=1)


def test_a_component_of_a_saved_model(bert, data, tmp_path, capsys):
    options = command("text-classification", data, tmp_path / "run", model=bert)
    message = refused(capsys, "finetune", *options, "--attention", "linear_transformer")
    assert "--attention would change the mechanism of a saved model" in message
    message = refused(
        capsys, "finetune", *command("text-classification", data, tmp_path / "run", model=bert, hidden_size=32)
    )
    assert "leave out options that change the shape" in message


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--peft", "lorra"], ["unknown PEFT method 'lorra': choose one of lora, ia3"]),
        (["--peft", "prefix"], ["--peft prefix does not work with a ForSequenceClassification class", "lora"]),
        (
            ["--peft", "lora", "--peft.target_modules", "q_proj,query"],
            ["names 'query', which no linear map of the model is called", "q_proj, up_proj, v_proj"],
        ),
        (["--peft", "lora", "--peft.target_modules", "*proj"], ["'*proj' is no regular expression"]),
        (["--peft", "prompt", "--peft.num_virtual_tokens", "64"], ["leaves no position for text, of the 64"]),
        (["--peft", "lora", "--peft.rank", "4"], ["--peft lora has no field 'rank'"]),
        (["--peft", "lora", "--peft.r", "many"], ["--peft.r: 'many' is no valid value; it takes a whole number"]),
    ],
)
def test_adapters(extra, words, bert, data, tmp_path, capsys):
    message = refused(capsys, "finetune", *command("text-classification", data, tmp_path / "run", model=bert), *extra)
    for word in words:
        assert word in message


def test_nothing_already_written_is_damaged(bert, classifier, data, tmp_path, capsys):
    """A refused command leaves the output folder, the model and the data as they were, whatever it is refused for."""
    output = copied(classifier, tmp_path)
    (output / "checkpoint-7").mkdir()
    (output / "checkpoint-7" / "trainer_state.json").write_text("{}")
    before = contents(output), contents(bert)
    broken = shutil.copytree(bert, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    bad = tmp_path / "train.csv"
    bad.write_text("text,label\na,1\nb,\n")
    for files, options, words in (
        (data, {"model": bert}, "already holds checkpoint-7"),
        ([str(bad)], {"model": bert, "overwrite_output_dir": True, "validation_fraction": 0}, "no class label"),
        (data, {"model": bert, "max_length": 99, "overwrite_output_dir": True}, "--max_length 99"),
        (data, {"model": tmp_path / "nowhere", "overwrite_output_dir": True}, "nowhere"),
        (data, {"model": broken, "overwrite_output_dir": True}, "is cut off"),
        (data, {"model": bert, "peft": "lora", "peft.target_modules": "x", "overwrite_output_dir": True}, "names 'x'"),
    ):
        assert words in refused(capsys, "finetune", *command("text-classification", files, output, **options))
        assert (contents(output), contents(bert)) == before


def test_progress_in_lines_for_people(bert, data, tmp_path, capsys):
    often = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    finetune("text-classification", data, tmp_path / "out", model=bert, **{**BARE, **often})
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 1/2, loss ") for line in lines)
    (held_out,) = [line for line in lines if "held out: " in line]
    assert held_out.startswith("step 2/2, held out: loss ") and "%" in held_out and "f1 " in held_out
    assert not any("{" in line for line in lines)


@pytest.mark.parametrize("at, said", [(1, "no checkpoint is whole yet"), (3, "/checkpoint-2' is whole: the same com")])
def test_an_interrupted_run_says_how_to_go_on(at, said, tmp_path, capsys):
    """Ctrl-C at a step: after the first one nothing is saved, after the third that of the second."""

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == at:
                raise KeyboardInterrupt

    saves = {**BARE, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    argv = command("text-classification", classification(tmp_path), tmp_path / "run", **saves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_xformers.cli.finetune.run", lambda argv, run=finetune_run: run(argv, [Stop()]))
        assert main(["finetune", *argv]) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-xformers: interrupted: ") and said in error
    if at == 3:
        assert main(["finetune", *argv, "--resume_from_checkpoint"]) == 0
