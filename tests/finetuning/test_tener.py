"""TENER with characters and a CRF from files: learning, the pipeline, and what is refused."""

import pytest
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from hf_xformers.cli import main
from tests.finetuning.task_data import command, finetune, predictions, tagging

LEARN = {"learning_rate": 0.02, "num_train_epochs": 3, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def test_from_files_to_the_pipeline(tmp_path, capsys):
    data = tagging(tmp_path, count=96)
    summary = finetune("token-classification", data, tmp_path / "run", variant="tener", **LEARN)
    assert summary["eval_f1"] >= 0.9 and summary["baseline_validation"]["f1"] == 0
    assert 0 < summary["eval_loss"] < 1
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "run")
    assert model.crf is not None
    tag = pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "run"))
    for row in predictions(tmp_path / "run")[:4]:
        found = {entry["word"]: entry["entity"] for entry in tag(" ".join(row["tokens"]))}
        wanted = {word: name for word, name in zip(row["tokens"], row["prediction"]) if name != "O"}
        assert found == wanted

    (tmp_path / "new.conll").write_text("a\tO\nfine\tB-GOOD\n\n")
    assert main(["evaluate", "--model", str(tmp_path / "run"), "--data", str(tmp_path / "new.conll"), "--json"]) == 0
    assert '"f1": 1.0' in capsys.readouterr().out


def test_a_chain_over_pieces_of_words(tmp_path):
    """With any encoder and tokenizer: the first pieces of words are the chain."""
    options = {**LEARN, "tag_decoder": "crf"}
    summary = finetune("token-classification", tagging(tmp_path, count=64), tmp_path / "run", **options)
    assert summary["variant"] == "xf_bert" and summary["eval_f1"] >= 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "single tags"),
        ({"tokenizer_type": "wordpiece"}, "--tokenizer_type words"),
    ],
)
def test_refusals(tmp_path, capsys, options, message):
    line = command("token-classification", tagging(tmp_path), tmp_path / "run", variant="tener", **options)
    assert main(["finetune", *line]) != 0
    assert message in capsys.readouterr().err


def test_a_word_without_characters(tmp_path, capsys):
    from tests.finetuning.task_data import write_lines

    rows = [{"tokens": ["a", word], "tags": ["O", "B-A"]} for word in ("b", "c", "", "d")]
    data = [str(write_lines(tmp_path / "train.jsonl", rows))]
    assert main(["finetune", *command("token-classification", data, tmp_path / "run", variant="tener")]) != 0
    assert "no characters" in capsys.readouterr().err
