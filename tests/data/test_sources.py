"""Text from files and from the Hub: the same documents by every road, a division that never moves, clear refusals."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from hf_xformers.data import load_text_dataset, stdlib_corpus
from hf_xformers.finetuning.options import TaskData
from hf_xformers.finetuning.sources import load_rows
from tests.hub.hub_server import Hub, Repo

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {index} with \u201cquotes\u201d, commas" for index in range(40)]


def texts(dataset):
    return [row["text"] for row in dataset]


def all_texts(splits):
    return sorted(text for part in splits.values() for text in texts(part))


def write(path, documents=TEXTS):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffixes[0]
    if kind == ".parquet":
        datasets.Dataset.from_dict({"id": list(range(len(documents))), "text": documents}).to_parquet(str(path))
        return path
    if kind in (".csv", ".tsv"):
        sep = "," if kind == ".csv" else "\t"
        lines = [f"id{sep}text"] + [f'{index}{sep}"{text}"' for index, text in enumerate(documents)]
    elif kind in (".json", ".jsonl"):
        lines = [json.dumps({"id": index, "text": text}) for index, text in enumerate(documents)]
    else:
        lines = documents
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.txt.gz"])
def test_every_format_gives_the_same_documents(tmp_path, name, streaming):
    splits = load_text_dataset(write(tmp_path / name), streaming=streaming)
    assert type(splits) is (datasets.IterableDatasetDict if streaming else datasets.DatasetDict)
    assert list(splits) == ["train", "validation"]
    assert all(list(part.features) == ["text"] for part in splits.values())
    assert all_texts(splits) == sorted(TEXTS)


def test_reading_stays_in_the_cache_folder(tmp_path, offline_and_private_cache):
    load_text_dataset(write(tmp_path / "a.txt"))
    assert list((offline_and_private_cache / "datasets").rglob("*.arrow"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_folder_glob_list_and_plain_files(tmp_path):
    write(tmp_path / "in" / "b.txt", TEXTS[:10])
    write(tmp_path / "in" / "deep" / "a.jsonl", TEXTS[10:20])
    write(tmp_path / "in" / "deep" / "c.en", TEXTS[20:30])
    (tmp_path / "in" / "zero.txt").touch()
    for name in ("README.md", "deep/LICENSE.txt", ".hidden.txt", ".git/x.txt"):
        write(tmp_path / "in" / name, ["not data"])
    write(tmp_path / "in" / "test_notes [1].txt", TEXTS[30:])
    known = sorted(TEXTS[:20] + TEXTS[30:])
    assert all_texts(load_text_dataset(tmp_path / "in")) == known
    assert all_texts(load_text_dataset(str(tmp_path / "in"), streaming=True)) == known
    assert all_texts(load_text_dataset(f"{tmp_path}/in/**/*.en")) == TEXTS[20:30]
    assert all_texts(load_text_dataset(tmp_path / "in" / "deep" / "c.en")) == TEXTS[20:30]
    assert all_texts(load_text_dataset(tmp_path / "in" / "test_notes [1].txt")) == TEXTS[30:]
    both = [tmp_path / "in" / "b.txt", f"{tmp_path}/in/d*/*.jsonl"]
    assert all_texts(load_text_dataset(both)) == sorted(TEXTS[:20])
    assert texts(load_text_dataset(both, validation_fraction=0)["train"]) == TEXTS[:20]


@pytest.mark.parametrize(
    "files, expected",
    [
        (["train.txt", "dev.txt", "test.txt"], ["train", "validation", "test"]),
        (["train-00000-of-00002.jsonl", "valid.csv"], ["train", "validation"]),
        (["train/x.txt", "val/y.txt"], ["train", "validation"]),
        (["train.txt", "more.txt"], ["train"]),
        (["book.txt", "dev-notes.txt"], ["train"]),
        (["test.txt", "val.txt"], ["train"]),
    ],
)
def test_splits_by_file_name(tmp_path, files, expected):
    folder = tmp_path / "validation_of_test"  # the name of the folder given says nothing
    for index, name in enumerate(files):
        write(folder / name, [f"{name} {index}", f"{name} again"])
    splits = load_text_dataset(folder, validation_fraction=0)
    assert list(splits) == expected
    assert all_texts(splits) == sorted(
        text for i, name in enumerate(files) for text in (f"{name} {i}", f"{name} again")
    )
    if expected[1:]:
        assert texts(splits["validation"])[1] == f"{files[1]} again"


def test_real_files():
    folder = Path(os.environ.get("HF_XFORMERS_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "wikitext2").is_dir():
        pytest.skip(f"no folder {folder / 'wikitext2'}; set HF_XFORMERS_DATA to where the real data is")
    splits = load_text_dataset(folder / "wikitext2")
    lines = {name: (folder / "wikitext2" / f"{name}.txt").read_text("utf-8").split("\n") for name in ("train", "test")}
    lines = {name: [line for line in part if line.strip()] for name, part in lines.items()}
    assert list(splits) == ["train", "validation", "test"]
    assert texts(splits["test"]) == lines["test"]
    assert sorted(texts(splits["train"]) + texts(splits["validation"])) == sorted(lines["train"])
    assert 0.03 < splits["validation"].num_rows / len(lines["train"]) < 0.07


def test_held_out_by_hash_of_the_text(tmp_path):
    many = [f"text number {index}" for index in range(3000)]
    write(tmp_path / "a.txt", many)
    write(tmp_path / "b.txt", many[::-1])
    splits = load_text_dataset(tmp_path / "a.txt", seed=7)
    validation = texts(splits["validation"])
    rule = [
        text
        for text in many
        if int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=b"7").digest(), "big") / 2**64 < 0.05
    ]
    assert validation == rule
    assert texts(splits["train"]) == [text for text in many if text not in set(rule)]
    assert abs(len(rule) - 150) < 4 * (3000 * 0.05 * 0.95) ** 0.5
    for other in (
        load_text_dataset(tmp_path / "a.txt", seed=7, streaming=True),
        load_text_dataset(tmp_path / "b.txt", seed=7),
    ):
        assert sorted(texts(other["validation"])) == sorted(validation)
        assert len(texts(other["train"])) == len(many) - len(rule)
    assert texts(load_text_dataset(tmp_path / "a.txt", seed=8)["validation"]) != validation


def test_few_documents_still_give_both_sides(tmp_path):
    write(tmp_path / "two.txt", ["one", "two"])
    for fraction in (0.001, 0.999):
        splits = load_text_dataset(tmp_path / "two.txt", validation_fraction=fraction)
        assert [part.num_rows for part in splits.values()] == [1, 1]
        with pytest.raises(ValueError, match="leaves no document on one side of so short a stream; give rows"):
            load_text_dataset(tmp_path / "two.txt", validation_fraction=fraction, streaming=True)


def test_what_a_document_is_and_blank_ones(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n  \nthree\n\n\nfour")
    read = {
        kind: texts(load_text_dataset(tmp_path / "a.txt", sample_by=kind, validation_fraction=0)["train"])
        for kind in ("line", "paragraph", "document")
    }
    assert read["line"] == ["one", "two", "three", "four"]
    assert [text.split() for text in read["paragraph"]] == [["one", "two"], ["three"], ["four"]]
    assert [text.split() for text in read["document"]] == [["one", "two", "three", "four"]]


@pytest.mark.parametrize("streaming", [False, True])
def test_text_column(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": i, "body": f"b{i}", "n": {"x": 1}}) + "\n" for i in range(4)))
    assert all_texts(load_text_dataset(path, streaming=streaming, validation_fraction=0)) == ["b0", "b1", "b2", "b3"]
    path.write_text('{"a": "x", "b": "y"}\n{"a": "z", "b": null}\n')
    options = {"streaming": streaming, "validation_fraction": 0}
    assert all_texts(load_text_dataset(path, text_column="b", **options)) == ["y"]
    (tmp_path / "b.csv").write_text("text,label\nNA,1\nnull,2\n,3\n")  # words that tables often stand for nothing
    assert all_texts(load_text_dataset(tmp_path / "b.csv", **options)) == ["NA", "null"]
    (tmp_path / "c.csv").write_text("text,label\n02100,1\n3.50,2\n")
    assert all_texts(load_text_dataset(tmp_path / "c.csv", **options)) == ["02100", "3.50"]
    with pytest.raises(ValueError, match=r"no column 'text'; choose one with text_column=.*'a' \(string\), 'b'"):
        load_text_dataset(path, **options)
    with pytest.raises(ValueError, match="no column of strings 'c'; its columns are 'a'"):
        load_text_dataset(path, text_column="c", **options)


def test_one_split_of_the_source(tmp_path):
    write(tmp_path / "train.txt", TEXTS[:20])
    write(tmp_path / "test.txt", TEXTS[20:])
    splits = load_text_dataset(tmp_path, split="test")
    assert list(splits) == ["train", "validation"]
    assert all_texts(splits) == sorted(TEXTS[20:])
    sliced = load_text_dataset(tmp_path, split="train[25%:50%]", validation_fraction=0)
    assert texts(sliced["train"]) == TEXTS[5:10]
    with pytest.raises(ValueError, match=r"no split 'unsupervised'; choose one of \['test', 'train'\]"):
        load_text_dataset(tmp_path, split="unsupervised")
    with pytest.raises(ValueError, match="is no slice"):
        load_text_dataset(tmp_path, split="train[a:b]")
    with pytest.raises(ValueError, match="load without streaming"):
        load_text_dataset(tmp_path, split="train[:5]", streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_stdlib(streaming):
    splits = load_text_dataset("stdlib", streaming=streaming)
    expected = stdlib_corpus()
    assert list(splits) == ["train", "validation"]
    assert all(list(splits[name].features) == ["text"] for name in splits)
    assert all(texts(splits[name]) == expected[name]["text"][:] for name in splits)
    with pytest.raises(ValueError, match="text_column='name'"):
        load_text_dataset("stdlib", text_column="name")


def bad_files(folder):
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"line\n" * 5000)[:30])
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "one.txt").write_text("single\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "broken.jsonl").write_text('{"text": "a"\n{"tex')
    (folder / "none").mkdir()
    (folder / "good.txt").write_text("a\nb\n")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "source, options, message",
    [
        ("empty.txt", {}, "'empty.txt' is empty"),
        ("blank.txt", {}, "holds no text"),
        ("latin.txt", {}, "could not be read as UTF-8 text .*0xe9"),
        ("broken.jsonl", {}, "could not be read as UTF-8 json"),
        ("cut.txt.gz", {}, "could not be read as UTF-8 text"),
        ("none", {}, "folder 'none' holds no file with a known suffix"),
        ("absent.txt", {}, "no file or folder 'absent.txt'"),
        ("./absent", {}, "no file or folder './absent'"),
        (["good.txt", "absent"], {}, "no file or folder 'absent'"),
        ("*.xyz", {}, r"pattern '\*.xyz' matches no file"),
        ("what is this?", {}, r"pattern 'what is this\?' matches no file"),
        ("not an id", {}, "neither 'stdlib'"),
        ("", {}, "names nothing"),
        ([], {}, "names nothing"),
        ("good.txt", {"config_name": "x"}, "config_name='x' is for Hub datasets"),
        ("good.txt", {"sample_by": "word"}, "sample_by='word' is unknown"),
        ("good.txt", {"validation_fraction": 1.5}, "validation_fraction=1.5"),
        ("owner/unknown", {}, "Hub dataset 'owner/unknown' could not be reached.*local file.*HF_HUB_OFFLINE"),
    ],
)
def test_refusals(tmp_path, monkeypatch, source, options, message, streaming):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_text_dataset(source, streaming=streaming, **options)


def test_refusals_of_other_kinds(tmp_path, monkeypatch):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"single document.*sample_by='paragraph'"):
        load_text_dataset("one.txt")
    assert texts(load_text_dataset("one.txt", validation_fraction=0)["train"]) == ["single"]
    for source in (3, None, [1, 2], {"train": "good.txt"}):
        with pytest.raises(TypeError, match="source must be"):
            load_text_dataset(source)


# --- a Hub of our own: the real client code, talking to a server on this machine -------------------------------------

CARD = "---\nconfigs:\n{}---\n"
CONFIG = "- config_name: {}\n  data_files:\n{}"
FILE = "  - split: {}\n    path: {}\n"
ROWS = "".join(json.dumps({"text": text, "id": index}) + "\n" for index, text in enumerate(TEXTS))
HUB = {
    "owner/plain": {
        "README.md": CARD.format(CONFIG.format("default", FILE.format("train", "data/train.jsonl"))),
        "data/train.jsonl": ROWS,
    },
    "owner/parts": {
        "README.md": CARD.format(
            CONFIG.format("big", FILE.format("unsupervised", "u.txt") + FILE.format("test", "t.txt"))
            + CONFIG.format("small", FILE.format("train", "t.txt") + FILE.format("dev", "u.txt"))
        ),
        "u.txt": "u1\nu2\nu3\n",
        "t.txt": "t1\nt2\n",
    },
}


HUB_CLIENT = """
import json
from hf_xformers.data import load_text_dataset

def attempt(*args, **options):
    try:
        splits = load_text_dataset(*args, **options)
        return {name: [row["text"] for row in part] for name, part in splits.items()}
    except ValueError as error:
        return str(error)

results = {}
for streaming in (False, True):
    results[str(streaming)] = [
        attempt("owner/plain", streaming=streaming),
        attempt("owner/parts", streaming=streaming),
        attempt("owner/parts", config_name="big", streaming=streaming),
        attempt("owner/parts", config_name="big", split="unsupervised", validation_fraction=0, streaming=streaming),
        attempt("owner/parts", config_name="small", streaming=streaming),
        attempt("owner/parts", config_name="small", split="valid", streaming=streaming),
        attempt("owner/absent", streaming=streaming),
    ]
results["slice"] = attempt("owner/parts", config_name="big", split="unsupervised[:2]", validation_fraction=0)
print("RESULTS" + json.dumps(results))
"""


def test_hub_datasets_through_the_real_client(tmp_path, monkeypatch, offline_and_private_cache):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with Hub() as hub:
        for name, files in HUB.items():
            hub.repos[name] = Repo()
            hub.repos[name].commit("main", {path: text.encode() for path, text in files.items()}, "data")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = subprocess.run(
            [sys.executable, "-c", HUB_CLIENT], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.split("RESULTS")[1])
    # Only the words in which `datasets` refuses a split differ between the two modes.
    no_split = [results[streaming].pop(5) for streaming in ("False", "True")]
    assert all("split='valid'" in message and "['train', 'dev']" in message for message in no_split)
    assert results["False"] == results["True"]

    local = load_text_dataset(write(tmp_path / "a.txt"))  # the same texts from a file are divided alike
    plain, no_config, no_train, unsupervised, small, absent = results["True"]
    assert plain == {name: texts(part) for name, part in local.items()}
    assert "config_name=None" in no_config and "'big', 'small'" in no_config
    assert "no split 'train'; choose one of ['test', 'unsupervised'] with split=" in no_train
    assert unsupervised == {"train": ["u1", "u2", "u3"]}
    assert small == {"train": ["t1", "t2"], "validation": ["u1", "u2", "u3"]}
    assert "no dataset 'owner/absent' that you may read" in absent
    assert results["slice"] == {"train": ["u1", "u2"]}


@pytest.mark.parametrize("mark", ["training_summary.json", ".hf_xformers.lock", "trainer_state.json", "checkpoint-5/"])
def test_what_a_run_wrote_is_no_data(mark, tmp_path, caplog):
    """An `output_dir` inside the data folder: its predictions and its tokenizer are left out, in one line."""
    run = tmp_path / "data" / "runs" / "first"
    (run / "checkpoint-5").mkdir(parents=True) if mark.endswith("/") else write(run / mark, [])
    write(run / "predictions_test.jsonl", ["what the model said"])
    write(tmp_path / "data" / "a.jsonl")
    assert all_texts(load_text_dataset(tmp_path / "data", validation_fraction=0)) == sorted(TEXTS)
    assert caplog.messages == [f"left out of the data, as training runs wrote them: {str(run)!r}"]
    rows = load_rows(TaskData(data=[str(tmp_path / "data")], validation_fraction=0))
    assert sorted(rows["train"]["text"]) == sorted(TEXTS)
    if mark != ".hf_xformers.lock":  # a run that goes on in the folder may be the one that asks
        with pytest.raises(ValueError, match="is that of a training run.*name the files to read"):
            load_text_dataset(run)
    assert all_texts(load_text_dataset(run / "predictions_test.jsonl", validation_fraction=0)) == [
        "what the model said"
    ]


def test_a_folder_of_mixed_files_says_what_was_read(tmp_path, caplog):
    write(tmp_path / "data" / "a.jsonl")
    (tmp_path / "data" / "b.txt").write_text("\n".join(TEXTS))
    (tmp_path / "data" / "README.md").write_text("about")
    for name in ("c.png", "d.png"):
        (tmp_path / "data" / name).write_bytes(b"x")
    load_text_dataset(tmp_path / "data", validation_fraction=0)
    folder = str(tmp_path / "data")
    assert caplog.messages == [f"of the folder {folder!r} are read: 1 .jsonl, 1 .txt; left out: 2 .png"]
    caplog.clear()
    (tmp_path / "data" / "b.txt").unlink()
    load_rows(TaskData(data=[folder], validation_fraction=0))
    assert caplog.messages == [f"of the folder {folder!r} are read: 1 .jsonl; left out: 2 .png"]
