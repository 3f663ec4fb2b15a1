"""Objectives beside the usual ones through the commands: a run goes on exactly from a checkpoint, and is evaluated."""

import json
import shutil

import pytest

import hf_xformers.cli
from tests.training.runs import history, pretrain, weights, write_text

CASES = {
    "bart_denoising": {"variant": "bart"},
    "mass": {"variant": "bart"},
    "t5_corruption": {"variant": "t5", "objective.corruption": "bert_style"},
    "span_bert": {"variant": "span_bert", "objective.sbo_position_dim": 8},
    "entity_replacement": {"variant": "bert"},
    "info_word": {"variant": "bert"},
    "bidirectional_lm": {"variant": "gpt", "objective.mix": "scalar"},
}


@pytest.mark.parametrize("name", CASES)
def test_runs_go_on_and_are_evaluated(name, tmp_path, capsys):
    options = {**CASES[name], "objective": name, "save_strategy": "steps", "save_steps": 2}
    if name == "entity_replacement":
        table = tmp_path / "table.json"
        table.write_text(json.dumps({"a": ["karan", "loran", "miran"], "b": ["katorsel", "netor", "tuvin"]}))
        options["objective.entity_table"] = table
    text = write_text(tmp_path / "text.txt", lines=60)
    out = pretrain(text, tmp_path / "out", **options)
    whole, log = weights(out), history(out)
    shutil.rmtree(out / "checkpoint-4")
    pretrain(text, out, "--resume_from_checkpoint", str(out / "checkpoint-2"), **options)
    again = weights(out)
    assert history(out) == log and all((whole[key] == again[key]).all() for key in whole)
    capsys.readouterr()
    assert hf_xformers.cli.main(["evaluate", "--model", str(out), "--data", str(text), "--json"]) == 0
    kind = {"entity_replacement": "entity", "info_word": "phrase"}.get(name)
    if kind is not None:  # what is predicted beside tokens has figures of its own, here of one batch
        figures = json.loads(capsys.readouterr().out)
        assert figures["rows"] <= 8
        beside = figures["aux_entity_replacement" if kind == "entity" else "aux_phrase_contrast"]
        assert figures[f"{kind}_loss"] == pytest.approx(beside, rel=1e-5) and beside > 0
        assert 0 < figures[f"baseline_{kind}_accuracy"] <= 1 and 0 <= figures[f"{kind}_accuracy"] <= 1
