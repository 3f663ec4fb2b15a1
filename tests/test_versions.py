"""The script that tries versions: what each set asks pip for, what it finds of a model, and what it prints."""

import json
import re

import pytest
import torch

from hf_xformers import compat
from tests.test_scripts import ROOT, load

versions = load(ROOT / "scripts" / "versions.py")
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
MINORS = versions.minor_versions(versions.dependencies()["transformers"])


def test_what_is_installed():
    lowest, pinned, newest, second = map(versions.requirements, ("lowest", "pinned", "newest", MINORS[1]))
    assert {f"transformers=={MINORS[0]}", "torch==2.8"} <= set(lowest)
    assert {f"{name}=={PINS[name]}" for name in versions.LIBRARIES} <= set(pinned)
    assert f"transformers{versions.dependencies()['transformers']}" in newest and "torch>=2.8" in newest
    assert set(second) - set(pinned) == {f"transformers=={MINORS[1]}.*"}
    assert len({len(asked) for asked in (lowest, pinned, newest, second)}) == 1


def test_the_pin_is_the_newest_minor_version():
    assert PINS["transformers"].startswith(f"{MINORS[-1]}.")


def test_unknown_sets_are_refused(capsys):
    with pytest.raises(ValueError, match=r"no set of versions '4\.9'; choose among lowest, pinned, newest, here, 5\."):
        versions.main(["--only", "here", "4.9"])


def found(tmp_path, pattern):
    versions.smoke(str(tmp_path / "result.json"), pattern)
    return json.loads((tmp_path / "result.json").read_text())


def test_a_model_of_each_kind_holds(tmp_path):
    result = found(tmp_path, "xf_(gpt2|t5|bert|vision_transformer|conformer)")
    assert result["tried"] == 6 and not result["failures"]
    assert result["versions"]["torch"] == torch.__version__


def test_what_fails_is_named(tmp_path, monkeypatch):
    model = next(model for _, model in versions.models("xf_gpt2"))
    monkeypatch.setattr(type(model), "save_pretrained", lambda *_: 1 / 0)
    monkeypatch.setitem(compat.BORROWED, "gone", ("torch.gone", "a test"))
    result = found(tmp_path, "xf_gpt2")
    assert [(step, name) for step, name, _ in result["failures"]] == [
        ("import", "gone"),
        ("save and load", "xf_gpt2 ForCausalLM"),
    ]
    monkeypatch.setattr(versions, "try_versions", lambda *_: result)
    printed = versions.table({"here": result, "lowest": {"error": "no pip"}}).splitlines()
    assert printed[2].split("|")[1:6:4] == [" here ", f" {result['versions']['peft']} "]
    assert printed[2].count(" 1 of 1 ") == 5 and printed[2].count(" 0 of 1 ") == 1
    assert printed[3].startswith("| lowest | no pip |") and len({line.count("|") for line in printed[:4]}) == 1
    assert "here: save and load of xf_gpt2 ForCausalLM: ZeroDivisionError: division by zero" in printed
    assert versions.main(["--only", "here"]) == 1
