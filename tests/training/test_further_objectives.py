"""Objectives beside the usual ones through the commands: a run goes on exactly from a checkpoint, and is evaluated."""

import json
import math
import shutil

import pytest

import hf_xformers.cli
from tests.training.runs import pretrain, same_run, write_text

CASES = {
    "bart_denoising": {"variant": "bart"},
    "mass": {"variant": "bart"},
    "t5_corruption": {"variant": "t5", "objective.corruption": "bert_style"},
    "span_bert": {"variant": "span_bert", "objective.sbo_position_dim": 8},
    "entity_replacement": {"variant": "bert"},
    "info_word": {"variant": "bert"},
    "bidirectional_lm": {"variant": "gpt", "objective.mix": "scalar"},
    "contrastive": {"variant": "bert", "objective.num_negatives": 3, "objective.loss": "nce"},
    # Its replaced tokens are drawn in every step, by a second model that a checkpoint has to hold.
    "replaced_token_detection": {"variant": "electra", "hidden_dropout_prob": 0.1},
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
    shutil.copytree(out, tmp_path / "whole")
    shutil.rmtree(out / "checkpoint-4")
    pretrain(text, out, "--resume_from_checkpoint", str(out / "checkpoint-2"), **options)
    same_run(out, tmp_path / "whole")
    capsys.readouterr()
    assert hf_xformers.cli.main(["evaluate", "--model", str(out), "--data", str(text), "--json"]) == 0
    kind = {"entity_replacement": "entity", "info_word": "phrase"}.get(name)
    if kind is not None:  # what is predicted beside tokens has figures of its own, here of one batch
        figures = json.loads(capsys.readouterr().out)
        assert figures["rows"] <= 8
        beside = figures["aux_entity_replacement" if kind == "entity" else "aux_phrase_contrast"]
        assert figures[f"{kind}_loss"] == pytest.approx(beside, rel=1e-5) and beside > 0
        assert 0 < figures[f"baseline_{kind}_accuracy"] <= 1 and 0 <= figures[f"{kind}_accuracy"] <= 1
        assert hf_xformers.cli.main(["evaluate", "--model", str(out), "--data", str(text)]) == 0
        shown = capsys.readouterr().out
        assert shown.count(f"{kind} accuracy") == 1 and f"baseline {kind}" not in shown  # next to it, in words
    if name == "contrastive":
        figures = json.loads(capsys.readouterr().out)
        assert figures["tokens"] == figures["rows"] and 0 < figures["baseline_loss"] <= math.log(8) + 1e-6
