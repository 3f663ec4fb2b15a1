"""Damaged models, names that are none, and empty data: every command that reads a model refuses them in one paragraph, before
it writes anything. (`finetune` has its own in test_finetune.py, `convert` in tests/conversion.)"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.test_errors import refused
from tests.training.runs import flags, pretrain

SHORT = {"block_size": 16, "max_steps": 1, "disable_tqdm": "true", "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def bert(text, tmp_path_factory):
    return pretrain(text, tmp_path_factory.mktemp("bert") / "run", variant="bert", max_steps=1)


def commands(model, text, output, good):
    """Every command as it would read `model`; `good` is a whole one."""
    return {
        "evaluate": ["evaluate", *flags(model=model, data=text)],
        "pretrain": ["pretrain", *flags(init_from=model, data=text, output_dir=output, **SHORT)],
        "uptrain": ["uptrain", *flags(model=model, data=text, output_dir=output, **SHORT)],
        "teacher": ["uptrain", *flags(model=good, teacher=model, data=text, output_dir=output, **SHORT)],
        "swap": ["convert", "--from", str(model), "--to", str(output), "--attention", "talking_heads"],
        "convert": ["convert", "--from", str(model), "--to", str(output)],
    }


def cut_off(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return ["safetensors"]


def no_header(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:4])
    return ["safetensors"]


def rewritten(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def missing(model):
    name = "model.trunk.layers.1.attention.q_proj.weight"
    rewritten(model, lambda tensors: tensors.pop(name))
    return [name]


def unexpected(model):
    rewritten(model, lambda tensors: tensors.update({"model.trunk.layers.7.extra": torch.zeros(2)}))
    return ["model.trunk.layers.7.extra"]


def other_size(model):
    name = "model.trunk.layers.1.attention.q_proj.weight"
    rewritten(model, lambda tensors: tensors.update({name: torch.zeros(3)}))
    return []


def broken_config(model):
    (model / "config.json").write_text('{"model_type": "xf_be')
    return ["config.json"]


DAMAGE = [cut_off, no_header, missing, unexpected, other_size, broken_config]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["evaluate", "pretrain", "uptrain", "teacher", "swap", "convert"])
def test_damaged_models(command, damage, text, bert, tmp_path, capsys):
    model = shutil.copytree(bert, tmp_path / "model")
    words = damage(model)
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    message = refused(capsys, *commands(model, text, tmp_path / "out", bert)[command])
    for word in words:
        assert word in message
    if "layers." not in "".join(words):
        assert str(model) in message
    assert any(remedy in message for remedy in ("again", "give the folder", "save"))
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["not a repository", "a/b/c", "./nowhere", "owner/"])
@pytest.mark.parametrize("command", ["evaluate", "pretrain", "uptrain", "teacher", "swap", "convert"])
def test_names_that_are_none(command, name, text, bert, tmp_path, capsys):
    message = refused(capsys, *commands(name, text, tmp_path / "out", bert)[command])
    assert repr(name) in message
    assert any(remedy in message for remedy in ("give the folder", "give a folder", "Correct the name"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
