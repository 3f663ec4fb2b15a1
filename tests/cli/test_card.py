"""`hf-xformers card`: a variant's or a checkpoint's card with measured rows and the attention map."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard

from hf_xformers import XFPerformerConfig, XFPerformerForCausalLM
from hf_xformers.cli import main
from hf_xformers.hub.attention_map import attention_maps, draw, map_config
from hf_xformers.hub.model_card import caption
from hf_xformers.variants import config_class
from tests.helpers import tiny_fields

MACHINE = {"device": "x86_64", "threads": 1, "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"}
SETTINGS = {
    "level": "layer",
    "batch_size": 1,
    "dtype": "float32",
    "training": {"layers": 2, "hidden_size": 64, "length": 32},
}
ROWS = [
    {"kind": "speed", "label": "mine", "variant": "xf_performer", "shape": "encoder", **row}
    for row in (
        {"at": 4096, "status": "ok", "ms": 3.25, "time ratio": 0.375, "peak MiB": 12.5, "memory ratio": None},
        {"at": 8192, "status": "timeout", "error": "late"},
        {"at": 4096, "status": "ok", "ms": 777.0, "label": "dense", "variant": "xf_bert"},
        {
            **{"kind": "quality", "shape": "decoder", "at": "mqar", "status": "ok", "head": "ForCausalLM"},
            **{"accuracy": 0.625, "chance accuracy": 0.125, "loss": 1.5, "steps": 400, "seconds": 9.0},
        },
    )
]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"machine": MACHINE, "settings": SETTINGS, "entries": {}, "rows": ROWS}))
    return path


def test_card_of_a_variant(tmp_path, results, capsys):
    target = tmp_path / "card.md"
    assert main(["card", "performer", "--results", str(results), "--to", str(target)]) == 0
    text = target.read_text()
    assert ModelCard(text).data.model_name == "xf_performer"
    section = text[text.index("## Compared with dense attention") : text.index("## Use")]
    assert "| mine | encoder | 4096 | 3.25 | 0.38 | 12.50 |" in section and "one attention layer" in section
    assert "| mqar | mine | ForCausalLM | 0.62 | 0.12 | 1.50 | 400 | 9.00 |" in section
    assert "777" not in section and "8192" not in section and "x86_64" in section
    assert "(maps/xf_performer.svg)" in text
    assert (tmp_path / "maps" / "xf_performer.svg").read_text() == draw(attention_maps(XFPerformerConfig))
    assert "maps/xf_performer.svg" in " ".join(capsys.readouterr().err.split())


def test_card_of_a_sweep(tmp_path, results, capsys):
    """A row for each width, with the rate that suits it."""
    content = json.loads(results.read_text())
    content["rows"] = [
        {
            **{**ROWS[3], "label": "mine", "variant": "xf_performer", "accuracy": accuracy, "state size": 8 * width},
            "point": {"hidden_size": width, "learning_rate": rate, "seed": seed},
        }
        for width, rate, seed, accuracy in ((8, 0.1, 0, 0.5), (8, 0.1, 1, 0.75), (8, 0.5, 0, 0.25), (16, 0.1, 0, 1.0))
    ]
    results.write_text(json.dumps(content))
    assert main(["card", "performer", "--results", str(results)]) == 0
    text = capsys.readouterr().out
    assert "2 layers, 8/16 wide" in text
    assert "| mqar | mine | decoder | 8 | 64 | 0.62 | 0.50 | 0.75 | 0.10 | 2 |" in text
    assert (
        "| mqar | mine | decoder | 16 | 128 | 1.00 | 1.00 | 1.00 | 0.10 | 1 |" in text and text.count("| mine |") == 2
    )


def test_card_without_a_file_is_printed(capsys):
    assert main(["card", "xf_longformer"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("---\n") and "# xf_longformer" in shown.out and "--to FILE" in shown.err


def test_card_of_a_checkpoint(tmp_path, results):
    config = XFPerformerConfig(**tiny_fields(XFPerformerConfig, "decoder"))
    folder = tmp_path / "my-model"
    XFPerformerForCausalLM(config).save_pretrained(folder)
    target = folder / "README.md"
    assert main(["card", str(folder), "--results", str(results), "--to", str(target)]) == 0
    text = target.read_text()
    assert "# my-model" in text and "XFPerformerForCausalLM" in text and str(tmp_path) not in text
    assert text.index("(maps/xf_performer.svg)") < text.index("| mine | encoder | 4096 |") < text.index("## Use")
    assert (folder / "maps" / "xf_performer.svg").exists()
    ModelCard(text)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["performr"], "Unknown variant 'performr'"),
        (["./nowhere"], "'./nowhere' is no folder"),
        (["bigbird", "--results", "{results}"], "has no figures of 'xf_bigbird'; measure it"),
        (["bigbird", "--results", "none.json"], "--results 'none.json' cannot be read"),
        (["bigbird", "--results", "{broken}"], "is no result of `hf-xformers benchmark`"),
        (["bigbird", "--to", "{folder}"], "is a folder; give a file in it"),
        (["bigbird", "--to", "{folder}/none/card.md"], "is in a missing folder"),
        (["{folder}"], "config.json"),
        ([], "the following arguments are required"),
    ],
)
def test_refusals(tmp_path, results, capsys, arguments, message):
    broken = tmp_path / "broken.json"
    broken.write_text('{"rows": []}')
    places = {"{results}": str(results), "{broken}": str(broken), "{folder}": str(tmp_path)}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    assert main(["card", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "variant", ["longformer", "bigbird", "sparse_transformer", "gpt3_alternating", "feedback_transformer"]
)
def test_maps_show_the_pattern(variant):
    """Each is sparse, unlike at the windows and blocks of the papers, which hold all 16 tokens."""
    maps = attention_maps(config_class(variant))
    least = min(float((weights != 0).float().mean()) for weights in maps.values())
    assert least < (0.75 if variant == "bigbird" else 0.48)


def test_map_of_a_window():
    """With one global token, the first, which reads all and is read by all; a decoder has none."""
    config, at = config_class("longformer"), range(16)
    for fields, near in (({}, 2), ({"attention": {"attention_window": 8}}, 4)):
        (weights,) = attention_maps(config, fields).values()
        expected = [[abs(i - j) <= near or 0 in (i, j) for j in at] for i in at]
        assert [[value > 0 for value in row] for row in weights.tolist()] == expected
    (causal,) = attention_maps(config, {"is_decoder": True}).values()
    assert [[value > 0 for value in row] for row in causal.tolist()] == [[0 <= i - j <= 2 for j in at] for i in at]
    assert "`attention_window=4` to fit so few and token 0 global" in caption(config)
    assert "with" not in caption(config_class("bert"))


def test_no_weight_is_lost_to_rounding():
    """Peaked scores must not look like a mask: dense attention reads every pair."""
    for variant in ("admin", "floater", "bert"):
        (weights,) = attention_maps(config_class(variant)).values()
        assert bool((weights > 0).all())


def test_options_choose_the_shape_and_the_mechanism():
    (weights,) = attention_maps(config_class("performer"), {"is_decoder": True}).values()
    assert bool((weights.triu(1) == 0).all())
    config = map_config(config_class("xformer"), {"attention": {"type": "band_attention"}})
    assert config.attention.window_size == 4
