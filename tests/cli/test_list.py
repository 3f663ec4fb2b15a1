import dataclasses
import json

import pytest

from hf_xformers.cli import main
from hf_xformers.cli.descriptions import variants
from hf_xformers.core.components import SLOTS
from hf_xformers.core.field_docs import meanings
from hf_xformers.families import SURVEY
from hf_xformers.variants import config_class, model_types


def listed(capsys, *argv):
    assert main(["list", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys, monkeypatch, *argv, columns="80"):
    """The lines of a listing, on a terminal of so many columns (None: in a pipe)."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["list", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_variant_is_listed(capsys):
    entries = listed(capsys)
    assert [entry["id"] for entry in entries] == list(model_types())
    for entry in entries:
        assert entry["changes"] and entry["paper"] and entry["shapes"]
        assert entry["section"] in SURVEY and (entry["kinds"] or entry["id"] == "xformer")


def test_shapes_are_those_of_the_classes(capsys):
    shapes = {entry["id"]: entry["shapes"] for entry in listed(capsys)}
    assert shapes["xf_bert"] == ["encoder", "decoder"]
    assert shapes["xf_deberta"] == ["encoder"]
    assert shapes["xf_gpt2"] == ["decoder"]
    assert shapes["xf_t5"] == ["seq2seq"]
    assert shapes["xf_vision_transformer"] == ["image"]
    assert shapes["xf_conformer"] == ["audio"]
    assert shapes["xformer"] == ["encoder", "decoder", "seq2seq"]


def test_what_changes_follows_from_section_and_components():
    found = {entry["id"]: entry["kinds"] for entry in variants(["bert", "reformer", "t5", "gpt3_alternating"])}
    assert found == {
        "xf_bert": ["training"],
        "xf_reformer": ["attention", "architecture"],  # reversible layers
        "xf_t5": ["position", "normalization", "training"],
        "xf_gpt3_alternating": ["attention"],  # in every second layer
    }


def test_at_80_columns_a_variant_takes_a_line_or_two(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch)
    assert max(map(len, lines)) <= 80 and len(lines) <= 2.6 * len(model_types())
    names = [name.removeprefix("xf_") for name in model_types()]
    starts = [number for number, line in enumerate(lines) if line[:1] == " " and line[1:2] != " "]
    assert sorted(lines[number].split()[0] for number in starts) == sorted(names)
    for number in starts:
        following = lines[number + 1 : number + 3]
        assert not all(line.startswith("      ") for line in following) or len(following) < 2, lines[number]
    assert "Sparse attention (survey 4.1)" in lines


def test_in_a_pipe_each_variant_is_one_line(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, columns=None)
    (line,) = [line for line in lines if line.split()[:1] == ["sparse_transformer"]]
    assert line.endswith(config_class("sparse_transformer").info.summary)
    text = "\n".join(lines)
    assert "\x1b" not in text and not set("│┃─━") & set(text)


@pytest.mark.parametrize(
    "argv, inside, outside",
    [
        (["--changes", "attention"], "xf_longformer", "xf_macaron"),
        (["--shape", "decoder"], "xf_gpt2", "xf_deberta"),
        (["--changes", "position", "--shape", "seq2seq"], "xf_t5", "xf_music_transformer"),
        (["experts"], "xf_switch_transformer", "xf_bert"),
        (["hash", "bucket"], "xf_reformer", "xf_hash_layers"),
        (["4096"], "xf_longformer", "xf_bert"),
        (["long documents"], "xf_ernie_doc", "xf_bert"),
        (["bert", "xf_t5"], "xf_t5", "xf_gpt2"),
    ],
)
def test_filters(argv, inside, outside, capsys):
    found = {entry["id"] for entry in listed(capsys, *argv)}
    assert inside in found and outside not in found


@pytest.mark.parametrize("columns", ["80", "60", None])
def test_everything_about_a_variant(columns, capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, "longformer", columns=columns)
    assert columns is None or max(map(len, lines)) <= int(columns)
    text = " ".join(" ".join(lines).split())
    info = config_class("longformer").info
    for words in (info.summary, info.cost, info.url, "XFLongformerForMaskedLM", "4.1 Sparse attention"):
        assert words in text
    assert "attention_window (or window) = 512: W, even; a token sees W / 2 tokens on each side." in text
    assert "max_position_embeddings=4096" in text and "pretrain --variant longformer" in text


def test_every_field_of_every_component_is_explained():
    for slot, registry in SLOTS.items():
        for name in registry:
            known = meanings(registry.get(name))
            for field in dataclasses.fields(registry.get(name)):
                assert known.get(field.name), (slot, name, field.name)


def test_components_of_a_variant(capsys, monkeypatch):
    entries = listed(capsys, "longformer", "--components")
    assert {entry["slot"]: entry["name"] for entry in entries}["attention"] == "longformer"
    (attention,) = listed(capsys, "longformer", "--components", "attention")
    assert attention["fields"]["attention_window"] == 512 and attention["aliases"]["attention_window"] == ["window"]
    lines = shown(capsys, monkeypatch, "longformer", "--components", "attention")
    assert any("longformer" in line for line in lines) and not any("performer" in line for line in lines)


def test_component_tables(capsys, monkeypatch):
    entries = listed(capsys, "--components")
    found = {slot: [entry["name"] for entry in entries if entry["slot"] == slot] for slot in SLOTS}
    assert found == {slot: [] if slot == "cross_attention" else list(SLOTS[slot]) for slot in SLOTS}
    assert all(entry["summary"] for entry in entries)
    (rotary,) = listed(capsys, "--components", "position.rotary")
    assert rotary in listed(capsys, "--components", "position") and rotary["fields"]["theta"] == 10000.0
    lines = shown(capsys, monkeypatch, "--components", "position")
    assert any("theta=10000.0" in line for line in lines) and max(map(len, lines)) <= 80
    lines = shown(capsys, monkeypatch, "--components", "position.rotary")
    assert any("theta = 10000.0: base of the frequencies" in line for line in lines)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["nonsense"], "no variant is called 'nonsense', or mentions it"),
        (["longfromer"], "Did you mean 'longformer'?"),
        (["--components", "atention"], "there is no slot 'atention'. Did you mean 'attention'?"),
        (["--components", "all.dense"], "there is no slot 'all'. The slots are"),
        (["--components", "longformer"], "`hf-xformers list longformer --components`"),
        (["--components", "attention.dens"], "Did you mean 'dense'?"),
        (["deberta", "--shape", "decoder"], "no variant fits"),
        (["--shape", "decodr"], "Did you mean 'decoder'?"),
        (["--objectives", "--shape", "decoder"], "--shape chooses variants, and --objectives lists none"),
        (["--objectives", "--families"], "--objectives and --families are two lists"),
        (["longformer", "--components", "attention.dense"], "'attention.dense' names a component"),
    ],
)
def test_unknown_names(argv, words, capsys):
    assert main(["list", *argv]) == 2
    assert words in capsys.readouterr().err


def test_families_that_convert(capsys, monkeypatch):
    from hf_xformers.conversion import converters

    assert [entry["model_type"] for entry in listed(capsys, "--families")] == sorted(converters())
    assert [entry["variant"] for entry in listed(capsys, "--families", "camembert")] == ["xf_roberta"]
    lines = shown(capsys, monkeypatch, "--families", "bert")
    assert any(line.startswith("xlm-roberta ") for line in lines) and max(map(len, lines)) <= 80
    assert main(["list", "--families", "nothing"]) == 2


def test_objectives_say_what_they_corrupt_and_need(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "--objectives"]) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert "nsp: whether one text follows the other" in text and "corrupts half of the pairs: swapped" in text
    assert "needs an encoder with ForMaskedLM; sentences and their translations; a cls token" in text
    assert "mlm=mlm" in text  # settings that are an objective go by its name
    assert main(["list", "--objectives", "tlm"]) == 0
    assert "sample_alpha = 0.5: tokens are chosen" in " ".join(capsys.readouterr().out.split())
