"""`hf-xformers search`: weights of operations learn on held-out text, a stopped search goes on, and the result is a
model."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_xformers.cli import main
from hf_xformers.cli.search import run
from hf_xformers.training.architecture_search import DERIVED, FOUND_FILE, choices_of, derived_config
from hf_xformers.variants import config_class, family
from tests.training.runs import pretrain_flags, weights

SMALL = {"variant": None, "hidden_size": 24, "num_hidden_layers": 2, "save_strategy": "steps", "save_steps": 3}
CANDIDATES = ["--block.candidates", "attention,glu,zero,conv_3"]


def arguments(text, folder, **options):
    given = {**SMALL, "objective": "clm", "max_steps": 6, "architecture_learning_rate": 0.1, **options}
    return [*pretrain_flags(text, folder, **given), *CANDIDATES]


class Stop(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_search(text, tmp_path, capsys):
    """Ends in a config that AutoModel reads; a search that was stopped ends in the same weights."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(arguments(text, whole, derived_layers=3)) == 0
    shown = capsys.readouterr().out
    found = json.loads((whole / FOUND_FILE).read_text())["layers"]
    config = AutoConfig.from_pretrained(whole / DERIVED)
    assert config.block.operations == tuple(tuple(part["operation"] for part in layer) for layer in found)
    assert not config.block.search and config.num_hidden_layers == 3 and config.is_decoder
    model = AutoModelForCausalLM.from_pretrained(whole / DERIVED)
    assert not any(choice.alpha is not None for choice in choices_of(model))
    assert len(AutoTokenizer.from_pretrained(whole / DERIVED)) <= model.config.vocab_size
    assert all(part["operation"] in shown for layer in found for part in layer)
    for part in (part for layer in found for part in layer):
        assert sum(part["shares"].values()) == pytest.approx(1.0, abs=1e-6)
        assert max(part["shares"].values()) > 0.27  # they have moved from a quarter each
    with pytest.raises(KeyboardInterrupt):
        run(arguments(text, parts, derived_layers=3), callbacks=[Stop()])
    assert run(arguments(text, parts, derived_layers=3, resume_from_checkpoint=parts / "checkpoint-3")) == 0
    (parts / "checkpoint-3" / "architecture_optimizer.pt").unlink()
    capsys.readouterr()
    assert main(["search", *arguments(text, parts, max_steps=9, resume_from_checkpoint=parts / "checkpoint-3")]) != 0
    assert "has no architecture_optimizer.pt, so that" in " ".join(capsys.readouterr().err.split())
    one, other = weights(whole), weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert sum("alpha" in name for name in one) == 4


def test_layers_are_those_of_both_towers():
    fields = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = config_class("dartsformer")(
        **fields, vocab_size=40, num_decoder_layers=1, is_encoder_decoder=True, decoder_start_token_id=0,
        block={"type": "dartsformer", "search": True},
    )  # fmt: skip
    derived = derived_config(family("dartsformer")["ForSeq2SeqLM"](config), 3)
    assert [tower.num_hidden_layers for tower in derived.tower_configs()] == [3, 3]


def test_refusals(text, tmp_path, capsys):
    for options, message in (
        ({"architecture_learning_rate": 0}, "learns nothing"),
        ({"architecture_weight_decay": -1}, "must be a number of at least 0"),
        ({"derived_layers": 0}, "1 or more"),
        ({"block": "vanilla"}, "a search is for block 'dartsformer'"),
        ({"validation_fraction": 0}, "--validation_fraction above 0"),
        ({"streaming": True}, "leave --streaming out"),
    ):
        given = arguments(text, tmp_path / "out", **options)
        given = given if "block" not in options else given[: -len(CANDIDATES)]
        assert main(["search", *given]) == 2
        assert message in capsys.readouterr().err
