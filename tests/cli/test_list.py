import json

import pytest

from hf_xformers.cli import main
from hf_xformers.components import SLOTS
from hf_xformers.variants import config_class, model_types


def listed(capsys, *argv):
    assert main(["list", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_variant_is_listed(capsys):
    entries = listed(capsys)
    assert [entry["id"] for entry in entries] == list(model_types())
    for entry in entries:
        assert entry["changes"] and entry["paper"] and entry["shapes"]


def test_shapes_are_those_of_the_classes(capsys):
    shapes = {entry["id"]: entry["shapes"] for entry in listed(capsys)}
    assert shapes["xf_bert"] == ["encoder", "decoder"]
    assert shapes["xf_deberta"] == ["encoder"]
    assert shapes["xf_gpt2"] == ["decoder"]
    assert shapes["xf_t5"] == ["seq2seq"]
    assert shapes["xformer"] == ["encoder", "decoder", "seq2seq"]


def test_a_few_by_name(capsys):
    assert [entry["id"] for entry in listed(capsys, "bert", "xf_t5")] == ["xf_bert", "xf_t5"]


def test_the_table_says_what_a_variant_changes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert config_class("bert").info.summary in out
    assert "Devlin et al. 2019" in out


@pytest.mark.parametrize("slot", list(SLOTS))
def test_components_have_their_fields(slot, capsys):
    entries = listed(capsys, "--components", slot)
    assert [entry["name"] for entry in entries] == list(SLOTS[slot])
    assert all(entry["summary"] for entry in entries)


def test_defaults_of_fields(capsys):
    (rotary,) = [entry for entry in listed(capsys, "--components", "position") if entry["name"] == "rotary"]
    assert rotary["fields"]["theta"] == 10000.0


def test_all_components(capsys):
    slots = {entry["slot"] for entry in listed(capsys, "--components")}
    assert slots == set(SLOTS) - {"cross_attention"}


def test_component_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "--components", "position"]) == 0
    assert "theta = 10000.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [(["nothing"], "Unknown variant 'nothing'"), (["--components", "atention"], "there is no slot 'atention'")],
)
def test_unknown_names(argv, words, capsys):
    assert main(["list", *argv]) == 2
    assert words in capsys.readouterr().err
