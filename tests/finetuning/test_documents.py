"""Rows that know more than a text: the sentences before them in their document, and the paragraphs of a text."""

import json

import pytest
from datasets import Dataset

from hf_xformers.cli import main
from hf_xformers.finetuning.options import TaskOptions
from hf_xformers.finetuning.tasks import Summarization
from hf_xformers.finetuning.tasks.document_context import WithContext, context_columns, rows_before
from hf_xformers.finetuning.tasks.generation import paragraph_numbers
from hf_xformers.modeling_tower import XFormerTower
from hf_xformers.variants import config_class

SIZES = "--hidden_size 16 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 32 --vocab_size 300"


def test_rows_before_stay_in_their_document():
    rows = Dataset.from_dict({"source": list("abcdef"), "doc_id": [1, 1, 2, 1, 2, 1]})
    assert rows_before(rows, 2, ("source",), "train") == [[], [0], [], [0, 1], [2], [1, 3]]
    assert rows_before(rows.remove_columns("doc_id"), 2, ("source",), "train")[3:] == [[1, 2], [2, 3], [3, 4]]
    assert rows_before(rows, 9, ("doc_id",), "train")[2] == [0, 1]  # the column is the text itself
    with pytest.raises(ValueError, match="row 1 of the train split has no document in column 'doc_id'"):
        rows_before(Dataset.from_dict({"source": ["a", "b"], "doc_id": ["x", None]}), 2, (), "train")


@pytest.mark.parametrize("side", ["encoder", "both"])
def test_sentences_before_are_padded_apart(side):
    stack = {"type": "han_nmt", "context_size": 2, "side": side}
    config = config_class("xf_han_nmt")(stack=stack, decoder_start_token_id=3, pad_token_id=0)
    tokenizer = type("Tokenizer", (), {"pad_token_id": 0})()
    ids, labels = [[5, 6], [7], [8, 9, 9]], [[4, 1], [6, 7, 1], [2, 1]]
    columns = context_columns([[], [0], [0, 1]], ids, labels)
    features = [{name: column[row] for name, column in columns.items()} for row in range(3)]
    batch = WithContext(lambda rows: {}, tokenizer, config)(features)
    assert batch["context_input_ids"].tolist() == [[[0, 0], [0, 0]], [[0, 0], [5, 6]], [[5, 6], [7, 0]]]
    assert batch["context_attention_mask"].tolist() == [[[0, 0], [0, 0]], [[0, 0], [1, 1]], [[1, 1], [1, 0]]]
    assert ("decoder_context_input_ids" in batch) == (side == "both")
    if side == "both":
        assert batch["decoder_context_input_ids"][2].tolist() == [[3, 4, 0], [3, 6, 7]]
        assert batch["decoder_context_attention_mask"][2].sum(-1).tolist() == [2, 3]


def test_paragraphs_of_tokens():
    assert paragraph_numbers([(0, 0), (0, 3), (3, 5), (7, 9), (9, 12), (0, 0)], [7, 11]) == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("text", [[], ["a", " "], 2.5])
def test_wrong_lists_of_texts_are_refused(text):
    rows = Dataset.from_list([{"document": text, "summary": "a"}])
    task = Summarization(TaskOptions(task="summarization"))
    task.find_columns(rows)
    with pytest.raises(ValueError, match="row 0 of the train split has"):
        list(task.texts(rows))


@pytest.mark.parametrize("variant", ["han_nmt", "hiersumm"])
def test_one_command_from_raw_lines(tmp_path, variant, monkeypatch):
    if variant == "han_nmt":
        rows = [{"source": f"line {n}", "target": f"Zeile {n}", "document": n // 4} for n in range(12)]
        task = ["--task", "translation"]
    else:
        rows = [{"document": ["one text here", f"and number {n}"], "summary": f"number {n}"} for n in range(12)]
        task = ["--task", "summarization", "--num_decoder_layers", "1"]
    for name, count in (("train", 12), ("test", 3)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:count]))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "test")]
    seen = set()
    entered = XFormerTower.embedded

    def embedded(self, vectors, types, context):
        seen.update(context.inputs)
        return entered(self, vectors, types, context)

    monkeypatch.setattr(XFormerTower, "embedded", embedded)
    code = main(
        ["finetune", "--variant", variant, *task, "--data", *files, *SIZES.split(), "--max_steps", "2"]
        + ["--output_dir", str(tmp_path / "run"), "--max_length", "32", "--max_target_length", "4"]
        + ["--report_to", "none"]
    )
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert code in (0, None) and any(name.startswith("test_") for name in summary)
    assert seen >= ({"context_input_ids", "context_attention_mask"} if variant == "han_nmt" else {"sentence_ids"})
