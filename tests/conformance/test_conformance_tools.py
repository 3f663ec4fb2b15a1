"""The conformance runner's own logic; `scripts/conformance.py --builtin bert` shows that what it runs is sound."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, BertConfig, T5Config

from hf_xformers.variants import config_class, model_types

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

import transformers_tests  # noqa: E402
from discovery import components_of, discover, load_overrides, overrides_for, waived  # noqa: E402
from report import summarise  # noqa: E402
from tiny_configs import tiny_kwargs  # noqa: E402


def write(path: Path, rules: dict) -> Path:
    path.write_text(json.dumps(rules))
    return path


def test_later_and_matching_rules_win(tmp_path):
    path = write(
        tmp_path / "rules.json",
        {
            "xf_*": {"config": {"a": 1, "b": 1}, "drop_classes": ["A"], "kind": "encoder"},
            "xf_bert": {"config": {"b": 2}, "drop_classes": ["B"], "kind": "decoder"},
            "bert": {"config": {"a": 9}},
        },
    )
    merged = overrides_for("xf_bert", load_overrides([path]))
    assert merged["config"] == {"a": 1, "b": 2}
    assert merged["drop_classes"] == ["A", "B"]
    assert merged["kind"] == "decoder"
    assert merged["waive"] == {}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"waive": {"test_x": " "}}, "without a reason"),
        ({"confg": {}}, "unknown key 'confg'"),
        ({"drop_classes": "A"}, "must be a list"),
    ],
)
def test_a_rule_that_says_nothing_valid_is_refused(tmp_path, rule, message):
    with pytest.raises(ValueError, match=message):
        load_overrides([write(tmp_path / "rules.json", {"xf_bert": rule})])


def test_the_rules_of_this_folder_are_valid():
    """And each belongs to a family, or to a component that some family's preset has."""
    ours = {name: components_of(config_class(name)) for name in model_types()}
    known = {*ours, *CONFIG_MAPPING, *(component for components in ours.values() for component in components)}
    for pattern, _ in load_overrides([TOOLS / "overrides.json"]):
        assert fnmatch.filter(known, pattern), f"{pattern!r} is no family and no component of one; take it out"


def test_a_components_rules_hold_in_its_families():
    rules = load_overrides([TOOLS / "overrides.json"])
    luna = overrides_for("xf_luna", rules, components_of(config_class("xf_luna")))["waive"]
    assert waived("test_retain_grad_hidden_states_attentions", "encoder", luna).startswith("an encoder's output")
    assert not waived("test_config", "encoder", luna)
    scale = overrides_for("xf_scale_norm", rules, components_of(config_class("xf_scale_norm")))["waive"]
    assert waived("test_tied_head_has_a_tp_plan_entry", "encoder", scale)
    span = overrides_for("xf_adaptive_span", rules, components_of(config_class("xf_adaptive_span")))["waive"]
    assert waived("test_attention_outputs", "seq2seq", span) and not waived("test_attention_outputs", "encoder", span)
    assert components_of(BertConfig) == [] and overrides_for("bert", rules)["waive"] == {}


def test_tiny_kwargs_of_a_config_with_aliases():
    bert, _ = tiny_kwargs(BertConfig, {"num_hidden_layers": 3}, "encoder")
    assert (bert["hidden_size"], bert["num_hidden_layers"], bert["vocab_size"]) == (32, 3, 99)
    t5, _ = tiny_kwargs(T5Config, {}, "seq2seq")
    assert (t5["d_model"], t5["d_kv"], t5["d_ff"], t5["decoder_start_token_id"]) == (32, 8, 64, 0)


def test_tiny_kwargs_shrink_component_specs_and_never_grow_them():
    @dataclass
    class Spec:
        block_size: int = 64
        window: int = 2
        num_global_tokens: int = 0

        def to_dict(self):
            return {"type": "sparse", **vars(self)}

    @dataclass
    class Config:
        hidden_size: int = 768
        table_rows: int = 5000

        def __post_init__(self):
            self.attention = Spec()

    kwargs, unknown = tiny_kwargs(Config, {}, "encoder")
    assert kwargs["attention"] == {"type": "sparse", "block_size": 4, "window": 2, "num_global_tokens": 0}
    assert kwargs["hidden_size"] == 32
    assert unknown == ["table_rows=5000"]


def test_discovery_of_built_in_models():
    bert, gpt2, t5 = discover(None, ["bert", "gpt2", "t5"])
    assert [bert.kind, gpt2.kind, t5.kind] == ["encoder", "decoder", "seq2seq"]
    assert [cls.__name__ for cls in bert.models["AutoModelForMaskedLM"]] == ["BertForMaskedLM"]
    with pytest.raises(ValueError, match="'no_such_model'"):
        discover(None, ["no_such_model"])


CASES = """
import unittest

class Test_one(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails_in_a_subtest(self):
        for name in "ab":
            with self.subTest(name):
                self.assertEqual(name, "a")

    def test_is_waived(self):
        self.skipTest("WAIVED: it may")

    def test_skips_every_subtest(self):
        for name in "ab":
            with self.subTest(name):
                self.skipTest("not for this one")

    def test_skips_one_subtest(self):
        for name in "ab":
            with self.subTest(name):
                if name == "a":
                    self.skipTest("not for this one")
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_verdict_a_test(tmp_path, monkeypatch, workers):
    (tmp_path / "test_cases.py").write_text(CASES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOOLS), str(TOOLS.parents[1])]))
    monkeypatch.setenv("HF_XFORMERS_CONFORMANCE_RESULTS", str(tmp_path / "results.json"))
    options = ["-c", os.devnull, "-p", "conformance_plugin", "-p", "no:cacheprovider", "-n", workers]
    command = [sys.executable, "-m", "pytest", "-q", *options, "test_cases.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1

    report = summarise(json.loads((tmp_path / "results.json").read_text()))
    outcomes = {name: test["outcome"] for name, test in report["families"]["one"]["tests"].items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_fails_in_a_subtest": "failed",
        "test_is_waived": "waived",
        "test_skips_every_subtest": "skipped",
        "test_skips_one_subtest": "passed",
    }
    assert report["totals"] == {"passed": 2, "failed": 1, "skipped": 1, "waived": 1}
    (failure,) = report["failures"]
    assert failure["test"] == "test_fails_in_a_subtest"
    assert "'b' != 'a'" in failure["error"]


def test_without_the_archive_nothing_is_tested(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_XFORMERS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip fails as it does without a network
    with pytest.raises(transformers_tests.Unavailable, match=r"transformers 9\.9\.9 could not be downloaded"):
        transformers_tests.lay_out(tmp_path / "layout", "9.9.9")
