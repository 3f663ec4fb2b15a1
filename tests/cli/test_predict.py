"""`predict`, and `evaluate` of fine-tuned models: rows in their order, the figures of the run, the floor beside
them."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from hf_xformers.cli import main
from hf_xformers.cli.finetune import report as finetune_report
from hf_xformers.finetuning.trained import does_a_task
from hf_xformers.hub.checkpoint_card import checkpoint_card
from tests.finetuning import task_data
from tests.finetuning.task_data import BAD, GOOD, finetune, predictions, sentences, write_lines

TEXTS = [text for text, _ in sentences(20, 7)]
TASKS = [task for task in task_data.DATA if task != "language-modeling"]


def run(capsys, *argv, code=0):
    """(standard output, standard error) of a command."""
    capsys.readouterr()
    assert main([str(word) for word in (*argv, "--use_cpu", "--no_progress")]) == code
    found = capsys.readouterr()
    return found.out, found.err


def predicted(capsys, *argv):
    return [json.loads(line) for line in run(capsys, "predict", *argv)[0].splitlines()]


def evaluated(capsys, *argv):
    return json.loads(run(capsys, "evaluate", *argv, "--json")[0])


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """One short run of each task, made when it is first asked for: (folder of the run, its data, its summary)."""
    made = {}

    def of(task):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            (folder / "data").mkdir()
            data = task_data.DATA[task](folder / "data")
            learn = {"learning_rate": 0.01, "num_train_epochs": 6, "hidden_dropout_prob": 0}
            learn["attention_probs_dropout_prob"] = 0
            options = learn if task == "text-classification" else {"max_steps": 2}
            made[task] = folder / "run", data, finetune(task, data, folder / "run", **options)
        return made[task]

    return of


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_gives_the_figures_of_the_run(task, runs, capsys, tmp_path):
    folder, _, summary = runs(task)
    figures = evaluated(capsys, "--model", folder, "--output", tmp_path / "p.jsonl", "--batch_size", "5")
    assert figures["task"] == task and figures["split"] == "validation"
    metrics = {key.removeprefix("eval_"): value for key, value in summary.items() if key.startswith("eval_")}
    if task == "question-answering":  # its loss is over the padding, too, which batches by length have less of
        del metrics["loss"]
    assert metrics and {key: figures[key] for key in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-3)
    floor = figures["baseline"]
    assert floor.pop("rule") == summary["trivial"]["rule"] and floor == summary["baseline_validation"]
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(rows) == summary["validation_rows"] and summary["best_checkpoint"]
    for row, before in zip(rows, predictions(folder), strict=True):
        same = pytest.approx(before["prediction"], abs=1e-5) if task == "regression" else before["prediction"]
        assert row["prediction"] == same and row["reference"] == before["reference"]


def test_rows_without_answers_are_predicted_in_their_order(runs, capsys, tmp_path):
    folder, _, _ = runs("text-classification")
    path = write_lines(tmp_path / "new.jsonl", [{"id": f"r{n}", "text": text} for n, text in enumerate(TEXTS)])
    rows = predicted(capsys, "--model", folder, "--data", path, "--batch_size", "3")
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(20)] and [row["text"] for row in rows] == TEXTS
    assert "reference" not in rows[0]
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    for row in rows:  # one by one, without padding
        with torch.no_grad():
            chances = model.eval()(**tokenizer(row["text"], return_tensors="pt")).logits.softmax(-1)[0].tolist()
        assert list(row["probabilities"].values()) == pytest.approx(chances, abs=1e-5)
        assert row["prediction"] == str(int(np.argmax(chances)))
    right = np.mean([row["prediction"] == str(label) for row, (_, label) in zip(rows, sentences(20, 7))])
    assert right >= 0.9
    (tmp_path / "new.txt").write_text("\n".join(TEXTS) + "\n")
    assert predicted(capsys, "--model", folder, "--data", tmp_path / "new.txt") == [
        {key: value for key, value in row.items() if key != "id"} for row in rows
    ]
    run(capsys, "predict", "--model", folder, "--data", path, "--output", tmp_path / "p.csv")
    table = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["prediction"] for row in table] == [row["prediction"] for row in rows]
    assert json.loads(table[0]["probabilities"]) == rows[0]["probabilities"]


def test_figures_of_predictions_have_names_and_floors(runs, capsys, tmp_path):
    folder, data, summary = runs("text-classification")
    said = run(capsys, "predict", "--model", folder, "--data", data[1], "--output", tmp_path / "p.jsonl")[1]
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    right = np.mean([row["prediction"] == row["reference"] for row in rows])
    figures = said.partition("measured on these rows: ")[2].rstrip()
    floor = summary["baseline_validation"]["accuracy"]
    assert f"accuracy {right:.1%} (baseline {floor:.1%})" in figures and "matthews correlation " in figures
    assert figures.startswith("loss ") and figures.endswith(f"; baseline: {summary['trivial']['rule']}")


def test_f1_names_its_class(runs, capsys):
    """Of two classes it is that of one: which one, every table says."""
    folder, data, summary = runs("text-classification")
    assert summary["f1_name"] == "f1 of '1'"
    finetune_report(summary, str(folder))
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "f1 of '1' (validation)" in shown and f"(baseline {summary['baseline_validation']['accuracy']:.1%})" in shown
    )
    assert summary["trivial"]["rule"] in shown
    assert "f1 of '1'" in run(capsys, "evaluate", "--model", folder, "--data", data[1])[0]
    assert "| f1 of '1' |" in str(checkpoint_card(folder, "mine"))
    assert runs("token-classification")[2]["f1_name"] == "entity f1"


def test_the_floor_of_classes_and_of_numbers(runs):
    _, data, summary = runs("text-classification")
    train, dev = (list(csv.DictReader(open(path))) for path in data)
    most = max("01", key=[row["label"] for row in train].count)
    share = np.mean([row["label"] == most for row in dev])
    assert summary["trivial"] == {"rule": f"always {most!r}", "answer": most}
    assert summary["baseline_validation"]["accuracy"] == pytest.approx(share)
    folder, _, summary = runs("regression")
    gold = np.array([row["reference"] for row in predictions(folder)])
    assert summary["baseline_validation"] == {
        "mse": pytest.approx(np.mean((gold - summary["trivial"]["answer"]) ** 2))
    }


def test_the_floor_of_other_tasks(runs):
    folder, _, summary = runs("token-classification")
    tags = [tag for row in predictions(folder) for tag in row["reference"]]
    assert summary["baseline_validation"]["accuracy"] == pytest.approx(np.mean([tag == "O" for tag in tags]))
    assert summary["baseline_validation"]["f1"] == 0
    _, _, summary = runs("translation")
    assert summary["trivial"]["rule"] == "the text to translate, copied" and summary["baseline_validation"]["bleu"] < 5
    folder, _, summary = runs("language-modeling")
    assert len(predictions(folder)) == summary["validation_rows"]
    assert 0 < summary["baseline_validation"]["accuracy"] < 0.5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token = summary["trivial"]["answer"]
    assert summary["trivial"]["rule"] == f"always the token {tokenizer.convert_ids_to_tokens(token)!r}"
    assert token not in tokenizer.all_special_ids


@pytest.mark.parametrize(
    "task, options, keys",
    [
        ("token-classification", ["--text", "the film was fine"], {"tokens", "prediction"}),
        (
            "question-answering",
            ["--text", "how was it", "--text_pair", "the " * 40 + "fine film"],
            {"question", "prediction", "null_score"},
        ),
        ("summarization", ["--text", "the film was fine", "--num_beams", "2"], {"source", "prediction"}),
        ("translation", ["--text", "the film"], {"source", "prediction"}),
        ("regression", ["--text", "a film"], {"text", "prediction"}),
    ],
)
def test_texts_on_the_command_line(task, options, keys, runs, capsys):
    (row,) = predicted(capsys, "--model", runs(task)[0], *options)
    assert set(row) == keys
    if task == "token-classification":
        assert row["tokens"] == ["the", "film", "was", "fine"] and len(row["prediction"]) == 4


def test_one_side_of_parallel_text(runs, capsys, tmp_path):
    (tmp_path / "new.en").write_text("the film\n\na day\n")
    rows = predicted(capsys, "--model", runs("translation")[0], "--data", tmp_path / "new.en")
    assert [row["source"] for row in rows] == ["the film", "a day"]


def test_multi_label(tmp_path, capsys):
    known = {"good": GOOD, "bad": BAD}
    rows = [
        {"text": text, "labels": [name for name, words in known.items() if set(words) & set(text.split())]}
        for text in TEXTS
    ]
    data = [str(write_lines(tmp_path / "train.jsonl", rows))]
    summary = finetune("multi-label", data, tmp_path / "run", max_steps=2)
    assert evaluated(capsys, "--model", tmp_path / "run")["f1_micro"] == pytest.approx(summary["eval_f1_micro"])
    (row,) = predicted(capsys, "--model", tmp_path / "run", "--text", "a film", "--label_threshold", "0.0001")
    assert row["prediction"] == ["bad", "good"] and set(row["probabilities"]) == {"bad", "good"}


# ------------------------------------------------------------------------------------------------ adapters


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return task_data.pretrained(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("method", ["lora", "prompt", "houlsby"])
def test_adapters(method, base, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    rows = [{"text": text, "label": ("no", "yes", "maybe")[n % 3]} for n, (text, _) in enumerate(sentences(24, 0))]
    data = [str(write_lines(tmp_path / "data" / "train.jsonl", rows))]
    options = {"model": base, "peft": method, "max_steps": 3, "learning_rate": 0.05}
    summary = finetune("text-classification", data, tmp_path / "run", **options)
    figures = evaluated(capsys, "--model", tmp_path / "run")
    assert figures["loss"] == pytest.approx(summary["eval_loss"], rel=1e-4)
    assert figures["accuracy"] == pytest.approx(summary["eval_accuracy"])
    (row,) = predicted(capsys, "--model", tmp_path / "run", "--text", "a film")
    assert set(row["probabilities"]) == {"no", "yes", "maybe"}
    base.rename(tmp_path / "moved")
    try:
        message = run(capsys, "predict", "--model", tmp_path / "run", "--text", "a film", code=2)[1]
        assert "say where it is with --base_model" in message
        moved = predicted(capsys, "--model", tmp_path / "run", "--text", "a film", "--base_model", tmp_path / "moved")
        assert moved == [row]
    finally:
        (tmp_path / "moved").rename(base)


def test_what_a_head_or_an_adapter_brings_is_not_reported_missing(base, tmp_path, caplog, capsys):
    logging.enable_propagation()
    try:
        data = [str(write_lines(tmp_path / "a.jsonl", [{"text": t, "label": n} for t, n in sentences(24, 0)]))]
        finetune("text-classification", data, tmp_path / "run", model=base, peft="lora", max_steps=1)
        predicted(capsys, "--model", tmp_path / "run", "--text", "a film")
        run(capsys, "features", "--model", base, "--data", *data, "--output", tmp_path / "out")
        assert "LOAD REPORT" not in caplog.text
    finally:
        logging.disable_propagation()
    damaged = load_file(base / "model.safetensors")
    del damaged["model.trunk.layers.0.attention.q_proj.weight"]
    shutil.copytree(base, tmp_path / "damaged")
    save_file(damaged, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    said = run(
        capsys, "features", "--model", tmp_path / "damaged", "--data", *data, "--output", tmp_path / "no", code=2
    )
    assert "has no weights for 'trunk.layers.0.attention.q_proj.weight'" in said[1]


# ------------------------------------------------------------------------------------------------ refusals


REFUSED = {
    "nothing": ("predict", [], "give either --data, files of rows, or --text"),
    "both": ("predict", ["--text", "a", "--data", "b.csv"], "give either --data, files of rows, or --text"),
    "pair of single texts": ("predict", ["--text", "a", "--text_pair", "b"], "this one reads single ones"),
    "no such column": ("predict", ["--data", "{data}", "--text_column", "body"], "there is no column 'body'"),
    "no such label": ("predict", ["--data", "{data}", "--label_column", "lable"], "there is no column 'lable'"),
    "no such split": ("evaluate", ["--data", "{data}", "--split", "dev"], "has no split 'dev': choose one of train"),
    "no answers": (
        "evaluate",
        ["--data", "{blind}"],
        "there is no column 'label' for label; the columns are ['text', 'other']",
    ),
    "a label that is new": ("evaluate", ["--data", "{other}"], "line 2: row 0 of the test split has the label '7'"),
    "texts to measure": ("evaluate", ["--text", "a"], "evaluate measures rows with true answers"),
    "form of the output": ("predict", ["--text", "a", "--output", "p.xml"], "ends in neither .jsonl nor .csv"),
    "folder of the output": ("predict", ["--text", "a", "--output", "no/p.csv"], "in a folder that is not there"),
    "no rows": ("predict", ["--text", "a", "--batch_size", "0"], "--batch_size 0 must be at least 1"),
    "beams of a classifier": (
        "predict",
        ["--text", "a", "--num_beams", "3"],
        "--num_beams 3 means nothing to a model for text-classification; leave it out",
    ),
    "threshold of single labels": (
        "predict",
        ["--text", "a", "--label_threshold", "0.3"],
        "--label_threshold 0.3 means nothing to a model for text-classification; leave it out",
    ),
    "split of texts": ("predict", ["--text", "a", "--split", "dev"], "--split is about files"),
    "table of predictions": ("predict", ["--text", "a", "--json"], "there is no option --json"),
    "unknown option": ("predict", ["--txt", "a"], "there is no option --txt"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals(case, runs, tmp_path, capsys):
    command, argv, words = REFUSED[case]
    folder, data, _ = runs("text-classification")
    (tmp_path / "blind.csv").write_text("text,other\na,b\n")
    (tmp_path / "other.csv").write_text("text,label\na,7\n")
    places = {"{data}": data[0], "{blind}": tmp_path / "blind.csv", "{other}": tmp_path / "other.csv"}
    argv = [places.get(word, word) for word in argv]
    message = run(capsys, command, "--model", folder, *argv, code=2)[1]
    assert words in " ".join(message.split()) and len(re.findall("hf-xformers: error", message)) == 1


def test_a_model_of_another_kind(base, runs, capsys):
    message = run(capsys, "predict", "--model", base, "--text", "a", code=2)[1]
    assert "is saved as XFBertForMaskedLM, which does not say what it was trained for; name it with --task" in message
    message = run(capsys, "predict", "--model", base, "--text", "a", "--task", "ner", code=2)[1]
    assert "needs a ForTokenClassification class; fine-tune it first" in message
    message = run(capsys, "predict", "--model", runs("language-modeling")[0], "--text", "a", code=2)[1]
    assert "is a language model" in message


def test_what_a_repository_of_the_hub_is_for(base, runs, monkeypatch, tmp_path):
    """Told by its small files: a model of a task, an adapter, a language model, and none at all."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    repositories = {"me/model": runs("text-classification")[0], "me/base": base, "me/adapter": tmp_path / "adapter"}

    def cached(name, file, **_):
        place = repositories[name] / file if name in repositories else None
        return str(place) if place is not None and place.is_file() else None

    monkeypatch.setattr("transformers.utils.cached_file", cached)
    found = {name: does_a_task(name) for name in (*repositories, "me/nothing")}
    assert found == {"me/model": True, "me/base": False, "me/adapter": True, "me/nothing": False}


def test_a_model_without_a_record(runs, tmp_path, capsys):
    """Saved by other means: the class says the task, the usual names say the columns, the rows themselves the
    floor."""
    folder, data, _ = runs("text-classification")
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    known = evaluated(capsys, "--model", folder, "--data", data[1])
    bare = evaluated(capsys, "--model", tmp_path / "bare", "--data", data[1])
    assert bare["accuracy"] == known["accuracy"] and bare["baseline"]["rule"].endswith(", by these rows")
    message = run(capsys, "evaluate", "--model", tmp_path / "bare", code=2)[1]
    assert "does not say what data it was trained with; give --data" in message
