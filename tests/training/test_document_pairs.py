"""`pretrain` and `evaluate` of pairs of segments: documents cut in sentences, from every kind of source."""

import json
import random

import pytest

import hf_xformers.cli
from hf_xformers.objectives import build_objective
from hf_xformers.training.text import TextData, load_splits, make_rows, open_tokenizer
from tests.refused import refused
from tests.training.runs import interrupted_and_resumed, pretrain, pretrain_flags, same_run, summary

BERT = {"variant": "bert", "objective": "sop", "block_size": 32, "save_strategy": "steps", "save_steps": 2}


def documents(count=24, seed=0):
    """Texts whose sentences count up, so that their order can be told."""
    draw = random.Random(seed)
    numbers = "one two three four five six seven eight".split()
    made = []
    for _ in range(count):
        name = draw.choice(["Anna", "Boris", "Clara", "David"])
        made.append(" ".join(f"{name} has {number} {draw.choice(['cats', 'dogs'])}." for number in numbers))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same documents as text with blank lines between, as JSONL and as Parquet."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("documents")
    texts = documents()
    # Lines end anywhere: it is the blank line that divides documents.
    (folder / "text.txt").write_text("\n\n".join(text.replace(" has ", "\nhas ") for text in texts) + "\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Dataset.from_dict({"text": texts}).to_parquet(str(folder / "rows.parquet"))
    return folder


def splits(path, objective, **options):
    return load_splits(TextData(data=[str(path)], **options), objective)


def test_every_source_gives_the_same_documents(files):
    """A document is on one side of the split as a whole, and the rows of both sides are pairs of its segments."""
    objective = build_objective({"type": "sop", "short_seq_prob": 0})
    found = {}
    for name in ("text.txt", "rows.jsonl", "rows.parquet"):
        parts = splits(files / name, objective, validation_fraction=0.2)
        found[name] = {split: {" ".join(text.split()) for text in part["text"]} for split, part in parts.items()}
    assert found["rows.jsonl"] == found["rows.parquet"]
    for sides in found.values():
        assert sides["train"] | sides["validation"] == set(documents()) and sides["validation"]
        assert not sides["train"] & sides["validation"]


def test_rows_are_pairs_within_the_block_size(files, tmp_path):
    from hf_xformers.data import train_tokenizer

    objective = build_objective({"type": "nsp", "dupe_factor": 2})
    texts = splits(files / "rows.jsonl", objective)["train"]
    tokenizer = train_tokenizer(texts, vocab_size=400, num_sentinels=0)
    rows = make_rows(texts, tokenizer, objective, 24, whole=False)
    once = make_rows(texts, tokenizer, build_objective("nsp"), 24, whole=False)
    assert max(map(len, rows["input_ids"])) <= 24 and len(rows) > 1.7 * len(once)
    assert rows["input_ids"][: len(once)] == once["input_ids"] and set(rows["next_sentence_label"]) == {0, 1}
    second = rows["input_ids"][len(once) :]
    assert second[: len(once)] != once["input_ids"]  # the second pass has other pairs


@pytest.mark.parametrize("settings, head", [({}, "NextSentencePrediction"), ({"objective.mlm": "mlm"}, "PreTraining")])
def test_evaluation(files, tmp_path, capsys, settings, head):
    """The figures of the run from `evaluate`, of the head that was trained."""
    options = {**BERT, **settings, "save_strategy": "no", "validation_fraction": 0.2, "position": "rotary"}
    output = pretrain(files / "rows.jsonl", tmp_path / "run", **options)
    capsys.readouterr()
    assert json.loads((output / "config.json").read_text())["architectures"] == [f"XFBertFor{head}"]
    assert hf_xformers.cli.main(["evaluate", "--model", str(output), "--json"]) == 0
    figures, made = json.loads(capsys.readouterr().out), summary(output)
    assert figures["loss"] == pytest.approx(made["eval_loss"], rel=1e-5) and figures["rows"] == made["validation_rows"]
    if settings:
        assert figures["sentence_accuracy"] == pytest.approx(made["eval_sentence_accuracy"])
        assert 0.5 <= figures["baseline_sentence_accuracy"] <= 1 and figures["aux_pair"] > 0
        assert figures["tokens"] > figures["rows"]
    else:
        assert figures["tokens"] == figures["rows"]
        assert figures["accuracy"] == pytest.approx(made["eval_accuracy"])
    assert hf_xformers.cli.main(["evaluate", "--model", str(output)]) == 0
    out = capsys.readouterr().out
    assert "sentence accuracy (held out)" in out if settings else "of always the most frequent label" in out


def test_resumption_is_exact(files, tmp_path):
    """Stopped between two checkpoints, past the first epoch, a run ends with the weights of one that was not."""
    options = {**BERT, "max_steps": 8, "hidden_dropout_prob": 0.1, "objective.mlm": "mlm"}
    whole = pretrain(files / "text.txt", tmp_path / "whole", **options)
    argv = pretrain_flags(files / "text.txt", tmp_path / "stopped", **options)
    interrupted_and_resumed(argv, 5)
    same_run(tmp_path / "stopped", whole)


def test_what_gives_no_pairs_is_refused(files, tmp_path, capsys):
    def said(data, *more, **options):
        return refused(capsys, "pretrain", *pretrain_flags(data, tmp_path / "no", **{**BERT, **options}), *more)

    lines = tmp_path / "lines.txt"
    lines.write_text("\n\n".join(f"only one sentence of number {n}" for n in range(30)))
    assert "has 1 sentence" in said(lines)
    assert "has 1 sentence" in said(lines, objective="nsp")
    single = tmp_path / "single.txt"
    single.write_text(documents(1)[0])
    assert "and there is 1" in said(single, objective="nsp", validation_fraction=0)
    assert "leave --streaming out" in said(files / "text.txt", "--streaming")
    assert "ForNextSentencePrediction" in said(files / "text.txt", variant="gpt2")


def test_a_tokenizer_without_special_tokens_gets_them(files, tmp_path):
    from hf_xformers.data import train_tokenizer

    texts = splits(files / "rows.jsonl", build_objective("sop"))["train"]
    train_tokenizer(texts, vocab_size=300, num_sentinels=0, style="gpt").save_pretrained(tmp_path / "gpt")
    tokenizer = open_tokenizer(str(tmp_path / "gpt"), build_objective("sop"))
    assert None not in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
    bare = train_tokenizer(texts, vocab_size=300, num_sentinels=0, style="gpt")
    with pytest.raises(ValueError, match="add_missing=\\['cls'\\]"):
        make_rows(texts, bare, build_objective("sop"), 32, whole=False)
