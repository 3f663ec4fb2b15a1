"""A source that is read as a stream: the same rows, no preparation on disk, exact resume."""

from __future__ import annotations

import shutil

import hf_xformers.cli
from hf_xformers.objectives import build_objective
from hf_xformers.training import preparation
from hf_xformers.training.text import TextData, load_splits, make_rows, train_tokenizer_for
from tests.training.runs import SHAPE, flags, pretrain, pretrain_flags, quiet, same_run


def test_rows_are_those_of_the_prepared_source(text):
    objective = build_objective("clm")
    prepared, streamed = (load_splits(TextData(data=[str(text)], streaming=streaming)) for streaming in (False, True))
    tokenizer = train_tokenizer_for(objective, prepared["train"], kind="bpe", vocab_size=360, max_length=None)
    for split, whole in (("train", False), ("validation", True)):
        first, second = (make_rows(s[split], tokenizer, objective, 16, whole=whole) for s in (prepared, streamed))
        assert [row["input_ids"] for row in second] == [row["input_ids"] for row in first]


def test_an_evaluation_reads_a_part_of_the_source(text, tmp_path, monkeypatch):
    choice = preparation.ModelChoice(variant="bert", objective="mlm", block_size=16)
    source = TextData(data=[str(text)], streaming=True, validation_fraction=0.5)
    rows = []
    for limit in (60, 2):
        monkeypatch.setattr(preparation, "STREAM_VALIDATION_DOCUMENTS", limit)
        args = quiet(tmp_path / str(limit), max_steps=1)
        prepared = preparation.Preparation(choice, source, args, fields=SHAPE).run()
        rows.append([row["input_ids"] for row in prepared.validation])
    assert 0 < len(rows[1]) < len(rows[0]) / 10


def test_a_resumed_stream_ends_with_the_same_weights(text, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    options = {"streaming": True, "max_steps": 6, "eval_strategy": "no", **saves}
    whole = pretrain(text, tmp_path / "whole", **options)
    pretrain(text, tmp_path / "cut", **options)
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    checkpoint = str(tmp_path / "cut" / "checkpoint-3")
    resumed = pretrain(text, tmp_path / "cut", **options, resume_from_checkpoint=checkpoint)
    same_run(resumed, whole)


def test_refusals(text, tmp_path, capsys):
    endless = pretrain_flags(text, tmp_path / "run", streaming=True, max_steps=-1)
    assert hf_xformers.cli.main(["pretrain", *endless]) == 2
    assert "--max_steps" in capsys.readouterr().err
    folder = pretrain(text, tmp_path / "run", max_steps=1)
    assert hf_xformers.cli.main(["evaluate", *flags(model=folder, data=text, streaming=True)]) == 2
    assert "--streaming" in capsys.readouterr().err


def test_spans_stream(text, tmp_path):
    folder = pretrain(text, tmp_path / "run", variant="t5", streaming=True, max_steps=2, vocab_size=420)
    assert hf_xformers.cli.main(["evaluate", "--model", str(folder)]) == 0  # which reads the text whole
    pruned = flags(model=folder, output_dir=tmp_path / "pruned", method="weights", sparsity=0.5, time_batches=0)
    assert hf_xformers.cli.main(["prune", *pruned]) == 0
