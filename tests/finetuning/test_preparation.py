"""What rows become: tags on pieces, labels, choices, splits, files of every kind."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value

from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.data import train_tokenizer
from hf_xformers.finetuning.options import TaskData, TaskOptions
from hf_xformers.finetuning.sources import load_rows, read_conll
from hf_xformers.finetuning.tasks import build_task
from hf_xformers.finetuning.tasks.base import _number_first, true_answers
from tests.finetuning.task_data import classification, regression, sentences, tagging, translation, write_lines

TEXTS = [text for text, _ in sentences(80, 0)]


@pytest.fixture(scope="module", params=["bpe", "wordpiece", "unigram"])
def tokenizer(request):
    size = {"bpe": 290, "wordpiece": 60, "unigram": 60}[request.param]
    return train_tokenizer(TEXTS, kind=request.param, vocab_size=size, num_sentinels=0)


def settled(task, rows, config=None, **options):
    made = build_task(TaskOptions(task, **options))
    made.settle({"train": rows}, config)
    return made


# ------------------------------------------------------------------------------------------------ tags

ROWS = Dataset.from_list(
    [
        {"tokens": ["sunny", "day", "rainy"], "tags": ["B-X", "O", "B-Y"]},
        {"tokens": ["the", "film"], "tags": ["O", "I-X"]},
    ]
)


def test_a_word_is_labelled_at_its_first_piece(tokenizer):
    task = settled("token-classification", ROWS)
    split = task.encode(ROWS, tokenizer, "train")
    assert task.labels.names == ["B-X", "B-Y", "I-X", "I-Y", "O"]  # B-Y may go on
    for row, places, ids in zip(split.rows, split.notes, split.features["input_ids"]):
        assert [word for _, word in places] == list(range(len(row["tokens"])))
        ends = [place for place, _ in places][1:] + [len(ids) - 1]
        pieces = [tokenizer.decode(ids[place:end]).strip() for (place, _), end in zip(places, ends)]
        assert pieces == row["tokens"]  # from its first piece to the next word's there is the word
    for tags, labels, places in zip(ROWS["tags"], split.features["labels"], split.notes):
        assert {p: task.labels.names[label] for p, label in enumerate(labels) if label != -100} == dict(
            zip([place for place, _ in places], tags)
        )


def test_pieces_are_those_of_running_text(tokenizer):
    """Words given one by one get the ids that they have in a sentence, where the model learnt them."""
    split = settled("token-classification", ROWS).encode(ROWS, tokenizer, "train")
    for row, ids in zip(ROWS, split.features["input_ids"]):
        running = tokenizer("x " + " ".join(row["tokens"]))["input_ids"]
        assert ids[1:-1] == running[-len(ids) + 1 : -1]


def test_every_piece_may_be_labelled(tokenizer):
    split = settled("token-classification", ROWS, label_all_pieces=True).encode(ROWS, tokenizer, "train")
    assert all(-100 not in labels[1:-1] and labels[0] == -100 for labels in split.features["labels"])


@pytest.mark.parametrize("every", [False, True])
def test_a_chain_of_tags_is_the_same_without_them(tokenizer, every):
    task = settled("token-classification", ROWS, label_all_pieces=every)
    task.read_config(XFormerConfig(tag_decoder="crf"))
    tagged, plain = (task.encode(rows, tokenizer, "test").features for rows in (ROWS, ROWS.remove_columns("tags")))
    assert list(plain["tag_mask"]) == [[int(label != -100) for label in labels] for labels in tagged["labels"]]
    assert list(plain["tag_mask"]) == list(tagged["tag_mask"])


def test_words_that_were_cut_off_are_outside(tokenizer):
    task = settled("token-classification", ROWS, max_length=4)
    split = task.encode(ROWS, tokenizer, "train")
    kept = np.zeros((2, 4), dtype=int)  # everything is B-X
    rows = task.predictions((kept,), split)
    assert len(rows[0]["prediction"]) == 3 and rows[0]["prediction"][0] == "B-X"
    assert rows[0]["prediction"][-1] == "O"
    task.score(rows)


def test_the_side_of_padding_moves_no_tag(tokenizer):
    tokenizer.padding_side = "left"  # of what it was trained for
    task = settled("token-classification", ROWS)
    split = task.encode(ROWS, tokenizer, "train")
    batch = task.collator(tokenizer, None, 0)(list(split.features))
    logits = torch.eye(len(task.labels.names))[batch["labels"].clamp(min=0)]
    kept = [part.numpy() for part in task.reduce({"logits": logits}, batch, False)]
    assert [row["prediction"] for row in task.predictions(kept, split)] == list(ROWS["tags"])


# ------------------------------------------------------------------------------------------------ labels


def rows_of(labels, feature=None):
    features = None if feature is None else Features({"text": Value("string"), "label": feature})
    return Dataset.from_dict({"text": ["x"] * len(labels), "label": labels}, features=features)


def test_labels_are_named_and_numbered():
    assert settled("text-classification", rows_of([10, 2, 1])).labels.names == ["1", "2", "10"]
    assert settled("text-classification", rows_of(["pos", "neg"])).labels.names == ["neg", "pos"]
    assert settled("text-classification", rows_of([1.0, 0.0])).labels.names == ["0", "1"]
    assert settled("text-classification", rows_of([0, 1], ClassLabel(names=["no", "yes"]))).labels.names == [
        "no",
        "yes",
    ]


def test_a_saved_head_keeps_its_numbers():
    config = XFormerConfig(id2label={0: "yes", 1: "no", 2: "maybe"}, label2id={"yes": 0, "no": 1, "maybe": 2})
    task = settled("text-classification", rows_of(["no", "yes"]), config)
    assert task.labels.names == ["yes", "no", "maybe"]
    feature = ClassLabel(names=["no", "yes"])  # numbered the other way round in the data
    task = settled("text-classification", rows_of([0, 1], feature), config)
    assert task.labels.id(0, feature, "train", 0, "label_column") == 1
    unnamed = XFormerConfig(num_labels=3)
    assert settled("text-classification", rows_of([0, 1]), unnamed).labels.names == ["0", "1", "2"]
    with pytest.raises(ValueError, match="the label 'other', which the model's config does not know"):
        settled("text-classification", rows_of(["other", "yes"]), config)


def test_choices_and_their_labels():
    rows = Dataset.from_list(
        [
            {"question": "q", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"},
            {"question": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "1"},
        ]
    )
    task = settled("multiple-choice", rows)
    tokenizer = train_tokenizer(TEXTS, vocab_size=290, num_sentinels=0)
    split = task.encode(rows, tokenizer, "train")
    assert split.features["labels"] == [1, 0] and len(split.features["input_ids"][0]) == 2
    collated = task.collator(tokenizer, None, 0)(list(split.features))
    assert collated["input_ids"].shape[:2] == (2, 2) and collated["labels"].tolist() == [1, 0]
    with pytest.raises(ValueError, match="it must be the number of the right choice, 0 to 1, or its letter"):
        task._label("C", None, "train", 0)
    assert task._label(1, [1, 2], "train", 0) == 0  # labels that are numbers
    rows = Dataset.from_list([{"sent1": None, **{f"ending{n}": f"e{n}" for n in range(12)}, "label": 2}])
    task = settled("multiple-choice", rows)
    assert task.choice_columns == [f"ending{n}" for n in range(12)]
    with pytest.raises(ValueError, match="row 0 of the train split has no text in column 'sent1'"):
        task.encode(rows, tokenizer, "train")


# ------------------------------------------------------------------------------------------------ files


def test_files_of_every_kind(tmp_path):
    for name in ("csv", "conll", "pairs"):
        (tmp_path / name).mkdir()
    splits = load_rows(TaskData(data=classification(tmp_path / "csv")))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 64, "validation": 24}
    assert splits["train"][0] == {"text": sentences(1, 0)[0][0], "label": sentences(1, 0)[0][1]}
    splits = load_rows(TaskData(data=tagging(tmp_path / "conll")))
    assert len(splits["train"]) == 48 and " ".join(splits["train"][0]["tokens"]) == sentences(1, 0)[0][0]
    splits = load_rows(TaskData(data=translation(tmp_path / "pairs")), ("xx", "en"))
    assert splits["validation"].column_names == ["xx", "en"]
    assert all(row["xx"] == row["en"].upper() for row in splits["train"])
    path = tmp_path / "rows.tsv"  # no header, and quotes that are none
    path.write_text('he said "no\t0\n"yes" she said\t1\n')
    rows = load_rows(TaskData(data=[str(path)], column_names=["text", "label"], validation_fraction=0))["train"]
    assert rows["text"] == ['he said "no', '"yes" she said'] and rows["label"] == [0, 1]


@pytest.mark.parametrize(
    "name, columns",
    [
        ("translation", {"source": "one and two", "target": 3}),
        ("multiple-choice", {"question": "one and two", "choice0": 3, "choice1": 4, "label": 0}),
        ("speech-recognition", {"audio": "x.wav", "text": 3}),
    ],
)
def test_texts_of_digits_in_a_csv_are_texts(tmp_path, name, columns):
    path = tmp_path / "rows.csv"
    path.write_text(",".join(columns) + "\n" + ",".join(map(str, columns.values())) + "\n")
    rows = load_rows(TaskData(data=[str(path)], validation_fraction=0))["train"]
    task = build_task(TaskOptions(name))
    task.find_columns(rows)
    if name == "speech-recognition":
        assert task._transcripts(rows, {}) == ["3"]
    else:
        assert "3" in list(task.texts(rows))


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("question-answering", {"question": "which", "context": "sent to 02100 or {}", "answer": "{}"}),
        ("multiple-choice", {"question": "how much", "option_0": "{}", "option_1": "{}", "label": 0}),
    ],
)
def test_answers_in_a_csv_stand_as_they_are_written(tmp_path, name, columns):
    path, written = tmp_path / "rows.csv", ["02100", "3.50", "1e3"]
    lines = [",".join(map(str, columns)), *(",".join(map(str, columns.values())).format(w, w) for w in written)]
    path.write_text("\n".join(lines) + "\n")
    task = build_task(TaskOptions(name))
    rows = task.load(TaskData(data=[str(path)], validation_fraction=0))["train"]
    task.settle({"train": rows}, None)
    if name == "multiple-choice":
        found = [task._choices(row, {}, 0)[0][0] for row in rows]
    else:
        found = [task._answers(rows, row, entry, {})[0][0] for row, entry in enumerate(rows["answer"])]
    assert found == written


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("text-classification", {"sentence1": "{}", "sentence2": "{}", "label": "{}"}),
        ("regression", {"text": "{}", "label": 0.5}),
        ("multi-label-classification", {"text": "{}", "labels": "{}"}),
        ("question-answering", {"question": "{}", "context": "{}", "answer": "{}"}),
        ("multiple-choice", {"question": "{}", "option_0": "{}", "option_1": "{}", "label": 0}),
        ("summarization", {"document": "{}", "summary": "{}"}),
        ("extractive-summarization", {"document": "{}", "summary": "{}"}),
        ("translation", {"source": "{}", "target": "{}"}),
        ("speech-recognition", {"audio": "a.wav", "text": "{}"}),
    ],
)
def test_texts_of_a_csv_stand_as_they_are_written(tmp_path, name, columns):
    """Also where each is a number; what is measured stays one."""
    path, written = tmp_path / "rows.csv", ["02100", "3.50", "1e3"]
    lines = [",".join(columns), *(",".join(map(str, columns.values())).replace("{}", w) for w in written)]
    path.write_text("\n".join(lines) + "\n")
    rows = build_task(TaskOptions(name)).load(TaskData(data=[str(path)], validation_fraction=0))["train"]
    for column, value in columns.items():
        if value == "{}" and column != "label":
            assert list(rows[column]) == written, column
        elif column == "label" and value != "{}":
            assert list(rows[column]) == [value] * 3


def test_a_class_called_nan_stands_behind_numbers():
    """Wherever it is met: an order that depended on this would differ between processes."""
    for names in itertools.permutations(["1", "nan", "2", "10"]):
        assert sorted(names, key=_number_first) == ["1", "2", "10", "nan"]


def test_documents_stay_whole(tmp_path):
    """Of translations that have them; a model that reads sentences before a row's own needs them."""
    rows = [{"source": f"line {n}", "target": f"Zeile {n}", "document": f"d{n // 5}"} for n in range(60)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    task = build_task(TaskOptions("translation"))
    with pytest.raises(ValueError, match="2"):
        task.load(TaskData(data=[str(path)], validation_fraction=2.0))
    splits = task.load(TaskData(data=[str(path)], validation_fraction=0.3))
    train, held = ({*splits[name]["document"]} for name in ("train", "validation"))
    assert train and held and not train & held and len(splits["train"]) + len(splits["validation"]) == 60
    task.before = 2
    for name, lost in (("document", False), ("source", True)):
        task.settle(splits, None)
        kept = splits["validation"].select_columns([*{"source", "target", name}])
        ids = {"input_ids": [[1]] * len(kept), "labels": [[1]] * len(kept)}
        with pytest.raises(ValueError, match="have lost the sentences before them") if lost else nullcontext():
            task._beside(kept, ids, "validation")


SQUAD = {"question": "which", "context": "the film"}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("text-classification", {"text": "the film", "label": -1}),
        ("token-classification", {"tokens": ["the", "film"], "tags": [None, None]}),
        ("question-answering", {**SQUAD, "answers": None}),
        ("question-answering", {**SQUAD, "answers": {"text": [], "answer_start": []}}),
        ("translation", {"source": "the film", "target": ""}),
        ("summarization", {"document": "the film", "summary": None}),
        ("extractive-summarization", {"document": "the film.", "summary": None}),
    ],
)
def test_a_test_split_may_keep_its_answers_back(name, row, tokenizer):
    """Its rows are predicted, and not measured."""
    task = build_task(TaskOptions(name))
    rows = Dataset.from_list([row])
    task.find_columns(rows)
    task.labels = task.no_answer = False
    encoded = task.encode(rows, tokenizer, "test")
    assert not encoded.labelled and not {"labels", "start_positions"} & set(encoded.features.column_names)
    if name == "question-answering" and row["answers"] is not None:
        task.no_answer = True  # then a question without an answer is one
        assert task.encode(rows, tokenizer, "test").labelled


def test_rows_without_a_label_are_no_hidden_ones():
    rows = Dataset.from_list([{"labels": []}, {"labels": []}])
    assert true_answers(rows, "labels", "test") == [[], []]


def test_files_of_one_split_whose_values_look_different(tmp_path):
    """One has integers alone, the next decimals, and one texts of digits alone."""
    for name, lines in (("a", "7,one,1"), ("b", "eight,two,2.5"), ("c", "nine,three,3")):
        (tmp_path / f"{name}.csv").write_text(f"text,other,score\n{lines}\n")
    (tmp_path / "d.jsonl").write_text('{"text": "ten", "other": "four", "score": 4}\n')
    names = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv", "d.jsonl")]
    rows = load_rows(TaskData(data=names, validation_fraction=0))["train"]
    assert rows["text"][:] == ["7", "eight", "nine", "ten"] and rows["score"][:] == [1.0, 2.5, 3.0, 4.0]


def test_conll_with_spaces_and_more_columns(tmp_path):
    path = tmp_path / "x.conll"
    path.write_text("-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\n\nOK UH O")
    assert list(read_conll(path)) == [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["OK"], "tags": ["O"]},
    ]


def test_rows_are_held_out_by_their_content(tmp_path):
    source = TaskData(data=regression(tmp_path), validation_fraction=0.3)
    splits = load_rows(source)
    held = {row["text"] for row in splits["validation"]}
    assert 0 < len(splits["validation"]) < 32 and not held & {row["text"] for row in splits["train"]}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert {row["text"] for row in load_rows(source)["validation"]} == held
    few = load_rows(TaskData(data=source.data, max_train_rows=5, max_eval_rows=2))
    assert (len(few["train"]), len(few["validation"])) == (5, 2)


# ------------------------------------------------------------------------------------------------ usual names


@pytest.mark.parametrize(
    "name, columns, found",
    [
        ("sentiment", ["review", "sentiment"], {"text_column": "review", "label_column": "sentiment"}),
        ("classification", ["sentence", "label", "idx"], {"text_column": "sentence", "label_column": "label"}),
        ("text_classification", ["text", "stars"], {"text_column": "text", "label_column": "stars"}),
        (
            "paraphrase",
            ["question1", "question2", "is_duplicate"],
            {"text_column": "question1", "text_pair_column": "question2", "label_column": "is_duplicate"},
        ),
        ("NLI", ["premise", "hypothesis", "label"], {"text_column": "premise", "text_pair_column": "hypothesis"}),
        ("sts", ["sentence1", "sentence2", "score"], {"text_pair_column": "sentence2", "label_column": "score"}),
        ("summarisation", ["article", "highlights"], {"text_column": "article", "target_column": "highlights"}),
        ("summarization", ["document", "summary"], {"text_column": "document", "target_column": "summary"}),
        ("ner", ["tokens", "pos_tags", "ner_tags"], {"text_column": "tokens", "label_column": "ner_tags"}),
        ("pos", ["tokens", "pos_tags", "ner_tags"], {"text_column": "tokens", "label_column": "pos_tags"}),
        ("qa", ["context", "question", "answers"], {"text_column": "question", "text_pair_column": "context"}),
    ],
)
def test_usual_names_of_tasks_and_columns(name, columns, found):
    from hf_xformers.cli.finetune import make_parser

    task = build_task(TaskOptions(name))
    task.find_columns(Dataset.from_dict({column: ["x"] for column in columns}))
    assert task.columns().items() >= found.items()
    shown = " ".join(make_parser({"task": name}).format_help(full=True).split())
    assert all(column in shown for column in found.values()) and "sentiment" in shown


def test_mcq_is_multiple_choice():
    rows = Dataset.from_list([{"question": "q", "choices": ["x", "y"], "answer": 1}])
    assert settled("mcq", rows).columns() == {
        "text_column": "question", "text_pair_column": None, "choice_columns": ["choices"], "label_column": "answer"
    }  # fmt: skip
