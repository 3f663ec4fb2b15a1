"""Tables as users have them: malformed ones are refused with file and line, odd but sound ones are read as they are
meant."""

import gzip
import json
import logging
from functools import partial

import pytest
from datasets import Dataset, DatasetDict

from hf_xformers.cli import main
from hf_xformers.data import load_text_dataset
from hf_xformers.finetuning.options import TaskData
from hf_xformers.finetuning.origin import ORIGIN
from hf_xformers.finetuning.sources import load_rows
from tests.finetuning.task_data import command, write_lines


def read(path, **options):
    options = {"validation_fraction": 0, **options}
    return load_rows(TaskData(data=[str(path)], **options), origins=True)


REFUSED = {
    "spare fields everywhere": (
        "a.csv",
        b"text,label\nx,a,1\ny,b,0\n",
        r"line 2 of .*a.csv' has 3 fields, and the header",
    ),
    "spare field in one row": ("a.csv", b'text,label\n"x,\nz",1\ny,b,0\n', "line 4 of .* has 3 fields"),
    "missing field": ("a.csv", b"text,label,more\nx,1\n", r"line 2 of .* has 2 fields, and the header names 3"),
    "spare field of a TSV": ("a.tsv", b"text\tlabel\nx\ty\t1\n", "line 2 of .* has 3 fields"),
    "compressed": ("a.csv.gz", gzip.compress(b"text,label\nx,y,1\n"), "line 2 of .*gz' has 3 fields"),
    "not compressed": ("a.csv.gz", b"text,label\nx,1\n", "is a damaged .gz file"),
    "a column twice": ("a.csv", b"text,text,label\nx,z,1\n", "names the column 'text' twice"),
    "open quote": ("a.csv", b'text,label\nx,1\n"y,1\nz,2\n', "begins at line 3 is malformed"),
    "text after a quote": ("a.csv", b'text,label\n"x"y,1\n', "begins at line 2 is malformed"),
    "semicolons": ("a.csv", b"text;label\nx;1\n", "'text;label' holds semicolons but no commas; save it with commas"),
    "tabs": ("a.csv", b"text\tlabel\nx\t1\n", "holds tabs but no commas; name it .tsv"),
    "commas": ("a.tsv", b"text,label\nx,1\n", "holds commas but no tabs; name it .csv"),
    "old line ends": ("a.csv", b"text,label\rx,1\ry,2\r", "lone carriage return"),
    "latin-1": ("a.csv", b"text,label\nx,1\ncaf\xe9,1\n", "line 3 of .* is not UTF-8 .byte 0xe9."),
    "utf-16": ("a.csv", "text,label\nx,1\n".encode("utf-16"), "line 1 of .* is not UTF-8"),
    "latin-1 tags": ("a.conll", b"EU\tB\ncaf\xe9\tO\n", "line 2 of .* is not UTF-8"),
    "blank": ("a.jsonl", b"\n\n", "nothing but blank lines"),
    "cut off": ("a.jsonl", b'{"text": 1}\n{"text": 1\n', "line 2 is no JSON"),
    "no objects": ("a.jsonl", b'{"text": 1}\n[1]\n', "line 2 is no object"),
    "a list of numbers": ("a.json", b"[1, 2]", "a list with '1' in it"),
    "null": ("a.json", b"null", "holds no rows but None"),
    "splits in one object": ("a.json", b'{"train": [{"a": 1}], "dev": [{"a": 1}]}', "under 'train', 'dev'; save each"),
    "no Parquet": ("a.parquet", b"x", "could not be read as parquet"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_malformed_files_are_refused_by_line(case, tmp_path):
    name, content, message = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path)
    if ".csv" in name:  # text for pretraining is read from the same files
        with pytest.raises(ValueError, match=message):
            load_text_dataset(path, text_column="text")


@pytest.mark.parametrize("case", ["no Parquet", "cut off"])
def test_a_malformed_file_is_told_of_once(case, tmp_path):
    """`datasets` does not log what is raised in a sentence."""
    name, content, _ = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    told = []
    handler = logging.Handler()
    handler.emit = told.append
    logging.getLogger("datasets").addHandler(handler)
    try:
        for load in (read, partial(load_text_dataset, text_column="text")):
            with pytest.raises(ValueError, match="could not be read"):
                load(tmp_path / name)
    finally:
        logging.getLogger("datasets").removeHandler(handler)
    assert not told


@pytest.mark.parametrize(
    "name, content, lines",
    [
        ("a.csv", b'\xef\xbb\xbftext,label\r\nx,1\r\n\r\n"y\nz",2\r\nq,3\r\n', [2, 4, 6]),
        ("a.tsv", b'\xef\xbb\xbftext\tlabel\nx\t1\n\ny"\t2\n', [2, 4]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "x", "label": 1}\r\n\r\n{"text": "y", "label": 2}\n', [1, 3]),
    ],
)
def test_rows_know_their_lines(name, content, lines, tmp_path):
    (tmp_path / name).write_bytes(content)
    rows = read(tmp_path / name)["train"]
    assert rows[ORIGIN] == [f"{name!r}, line {line}" for line in lines]
    assert rows["text"][0] == "x" and rows["label"] == list(range(1, len(lines) + 1))
    plain = load_rows(TaskData(data=[str(tmp_path / name)], validation_fraction=0))["train"]
    assert plain.column_names == ["text", "label"]


def test_marks_and_line_ends_are_no_part_of_a_token(tmp_path):
    (tmp_path / "a.conll").write_bytes(b"\xef\xbb\xbfEU\tB\r\nis\tO\r\n\r\nok\tO")
    rows = read(tmp_path / "a.conll")["train"]
    assert rows["tokens"] == [["EU", "is"], ["ok"]] and rows[ORIGIN][1] == "'a.conll', line 4"
    (tmp_path / "t.en").write_bytes(b"\xef\xbb\xbfone\rmore\r\ntwo\n")
    (tmp_path / "t.xx").write_bytes(b"ONE\nTWO\n")
    source = TaskData(data=[str(tmp_path / "t.en"), str(tmp_path / "t.xx")], validation_fraction=0)
    assert load_rows(source, ("en", "xx"))["train"]["en"] == ["one\rmore", "two"]


@pytest.mark.parametrize(
    "task, rows, words",
    [
        ("text-classification", "text,label\na,1\nb,\n", "'train.csv', line 3: row 1 of the train split has no label"),
        ("text-classification", "text,label\na,1.5\nb,1\n", "line 2: row 0 of the train split has the label 1.5"),
        ("regression", "text,score\na,1\nb,much\n", "line 3: row 1 of the train split has the label 'much'"),
        (
            "text-classification",
            "text,label\na,1\n,0\n",
            "line 3: row 1 of the train split has no text in column 'text'",
        ),
        ("summarization", "text,summary\na,b\nc,\n", "line 3: row 1 of the train split has None in column 'summary'"),
    ],
)
def test_a_row_at_fault_is_named(task, rows, words, tmp_path, capsys):
    path = tmp_path / "train.csv"
    path.write_text(rows)
    assert main(["finetune", *command(task, [str(path)], tmp_path / "run", validation_fraction=0)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------------------------------------ other forms


def squad(contexts=6, questions=2):
    def entry(c, q):
        return {"id": f"{c}-{q}", "question": f"what {q}", "answers": [{"text": "x", "answer_start": 0}]}

    paragraphs = [{"context": f"x y {c}", "qas": [entry(c, q) for q in range(questions)]} for c in range(contexts)]
    return {
        "version": "v",
        "data": [{"title": "t", "paragraphs": paragraphs[at]} for at in (slice(2), slice(2, None))],
    }


def test_the_official_file_of_squad(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad()))
    splits = read(path, validation_fraction=0.3, max_train_rows=3)
    assert len(splits["train"]) == 3 and splits["train"][0][ORIGIN].startswith("'squad.json', question ")
    whole = read(path, validation_fraction=0.3)
    assert len(whole["train"]) + len(whole["validation"]) == 12
    assert not set(whole["train"]["context"]) & set(whole["validation"]["context"])  # a context is on one side
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "c"}]}]}))
    with pytest.raises(ValueError, match="one is without 'qas'; every paragraph needs"):
        read(path)


def test_folders_of_save_to_disk(tmp_path):
    train = Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
    dev = Dataset.from_dict({"text": ["d"], "label": [1]})
    DatasetDict(train=train, dev=dev).save_to_disk(str(tmp_path / "both"))
    dev.save_to_disk(str(tmp_path / "test"))
    splits = load_rows(TaskData(data=[str(tmp_path / "both")], test_data=[str(tmp_path / "test")]))
    found = {split: rows["text"] for split, rows in splits.items()}
    assert found == {"train": ["a", "b", "c"], "validation": ["d"], "test": ["d"]}
    assert load_rows(TaskData(data=[str(tmp_path / "test")], validation_fraction=0))["train"]["text"] == ["d"]
    write_lines(tmp_path / "more.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match="was written by save_to_disk and '.*more.jsonl' was not"):
        load_rows(TaskData(data=[str(tmp_path / "both"), str(tmp_path / "more.jsonl")]))
    next((tmp_path / "both" / "train").glob("*.arrow")).write_bytes(b"x")
    for load in (
        lambda: load_rows(TaskData(data=[str(tmp_path / "both")])),
        lambda: load_text_dataset(tmp_path / "both"),
    ):
        with pytest.raises(ValueError, match="written by save_to_disk, does not load .*save or copy it again"):
            load()


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_folders_as_text(streaming, tmp_path):
    texts = [f"text {n}" for n in range(9)]
    Dataset.from_dict({"text": texts, "n": range(9)}).save_to_disk(str(tmp_path / "one"))
    splits = load_text_dataset(tmp_path / "one", streaming=streaming, validation_fraction=0.5)
    assert sorted(row["text"] for part in splits.values() for row in part) == texts
    both = {split: Dataset.from_dict({"text": [text]}) for split, text in (("train", "a"), ("valid", "b"))}
    DatasetDict(both).save_to_disk(str(tmp_path / "two"))
    splits = load_text_dataset(tmp_path / "two", streaming=streaming)
    found = {split: [row["text"] for row in part] for split, part in splits.items()}
    assert found == {"train": ["a"], "validation": ["b"]}
