"""Extractive summarisation: the oracle, labels of sentences, which sentences are taken, and one whole run."""

import itertools
import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_xformers.cli import main
from hf_xformers.data import train_tokenizer
from hf_xformers.finetuning.options import TaskOptions
from hf_xformers.finetuning.tasks import ExtractiveSummarization
from hf_xformers.metrics import compute, greedy_oracle

SENTENCES = ["A red cat sat.", "Dogs bark at night.", "The moon is high.", "A cat and dogs sleep."]


def quality(chosen, summary):
    """ROUGE-1 and ROUGE-2 of sentences (their bigrams do not cross, as no bigram of the summary does here)."""
    return sum(
        compute("rouge", [" ".join(SENTENCES[index] for index in chosen)], [summary])[key]
        for key in ("rouge1", "rouge2")
    )


def test_oracle_is_the_best_pair():
    summary = "Red cat sat. The moon is high."
    assert greedy_oracle(SENTENCES, summary) == [0, 2]
    best = max(itertools.combinations(range(4), 2), key=lambda pair: quality(pair, summary))
    assert list(best) == [0, 2]
    assert greedy_oracle(SENTENCES, summary, most=1) == [2] and greedy_oracle(SENTENCES, "nothing") == []


def rows_of(count=12):
    return [{"document": " ".join(SENTENCES), "summary": "A red cat sat. The moon is high."} for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(SENTENCES)] * 3, vocab_size=300, num_sentinels=0)


def test_labels_and_predictions(tokenizer):
    tokenizer.padding_side = "left"  # of what it was trained for
    task = ExtractiveSummarization(TaskOptions(task="extractive-summarization"))
    rows = Dataset.from_list([*rows_of(1), {"document": "Dogs bark. A red cat sat.", "summary": "A red cat sat."}])
    task.settle({"train": rows}, None)
    encoded = task.encode(rows, tokenizer, "train")
    assert task.take == 2 and task.trivial(encoded).rule == "the first 2 sentences"
    config = type("Config", (), {"config": None})()
    batch = task.collator(tokenizer, config, 0)(list(encoded.features))
    for row, oracle in enumerate(([1, 0, 1, 0], [0, 1])):
        labels, ids = batch["labels"][row], batch["input_ids"][row]
        assert labels[labels >= 0].tolist() == oracle
        assert (ids[labels >= 0] == tokenizer.sep_token_id).all()
    labels = batch["labels"].clamp(min=0)
    logits = np.eye(2)[labels.numpy()]

    kept = [part.numpy() for part in task.reduce({"logits": torch.tensor(logits)}, batch, False)]
    predicted = task.predictions(kept, encoded)
    assert [row["chosen"] for row in predicted] == [[0, 2], [0, 1]]
    assert predicted[0]["prediction"] == "A red cat sat.\nThe moon is high."
    assert kept[1][:, 1].tolist() == [4, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"document": " ", "summary": "a"}, "has no sentence in column 'document'"),
        ({"document": ["a", " "], "summary": "a"}, "sentence 1 of column 'document' is empty"),
        ({"document": "A. B.", "summary": " "}, "which is no summary"),
    ],
)
def test_wrong_rows(row, message):
    with pytest.raises(ValueError, match=message):
        ExtractiveSummarization(TaskOptions(task="extractive")).settle({"train": Dataset.from_list([row])}, None)


def test_number_of_sentences_is_checked():
    with pytest.raises(ValueError, match="--summary_sentences 0 must be at least 1"):
        ExtractiveSummarization(TaskOptions(task="extractive", summary_sentences=0))


def test_one_command_from_raw_lines(tmp_path):
    for name, count in (("train", 12), ("test", 3)):
        lines = (json.dumps(row) for row in rows_of(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "test")]
    sizes = "--vocab_size 300 --hidden_size 16 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 32"
    code = main(
        ["finetune", "--variant", "hibert", "--task", "extractive-summarization", "--data", *files, *sizes.split()]
        + ["--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--max_length", "64", "--report_to", "none"]
    )
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert code in (0, None) and summary["trivial"]["answer"] == 2 and "test_rougeL" in summary
