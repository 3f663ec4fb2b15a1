"""Contract: what is saved comes back through the Auto classes, the same in class, config, names and outputs."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_xformers import XFormerConfig
from hf_xformers.core.components import Spec
from hf_xformers.variants import model_types
from tests.common.cases import AUTO, SHAPES, each_case, each_part
from tests.helpers import aligned, pad, tokens


def fields(config):
    """What a config says, without where it was read from."""
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


@each_part
def test_save_and_load(case, tmp_path):
    model = case.shared(torch.float32)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        expected = case.run(model, ids, mask)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded, report = getattr(transformers, AUTO[case.head]).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) is case.family[case.head]
    assert not any(report.values()), report
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(case.run(aligned(loaded), ids, mask), expected)

    assert fields(loaded.config) == fields(model.config)
    assert type(loaded.config) is case.config_class and loaded.config.architectures == [type(model).__name__]

    # A new model from the saved config has the very same parameters, by name and shape.
    config = AutoConfig.from_pretrained(tmp_path)
    rebuilt = getattr(transformers, AUTO[case.head]).from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in rebuilt.state_dict().items()} == shapes


@each_case
def test_config_round_trip(case, tmp_path):
    """config.json, written, read and written again, is the same file; specs are specs again."""
    config = case.config()
    config.save_pretrained(tmp_path / "first")
    read = AutoConfig.from_pretrained(tmp_path / "first")
    read.save_pretrained(tmp_path / "second")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("first", "second")]
    assert texts[0] == texts[1]
    assert fields(read) == fields(config) and type(read) is type(config)
    for view, again in zip(config.tower_configs(), read.tower_configs(), strict=True):
        for index in range(view.num_hidden_layers):
            for slot in ("attention", "feedforward", "normalization", "residual", "position"):
                spec = getattr(again.layer(index), slot)
                assert isinstance(spec, Spec) and spec == getattr(view.layer(index), slot)
    assert read.layer(0).num_attention_heads == config.layer(0).num_attention_heads


@each_part
def test_no_meta_leftovers(case, tmp_path):
    """Tables that a component computes for itself survive loading, which builds the model without values."""
    model = case.shared(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    buffers = dict(model.named_buffers())
    for name, buffer in loaded.named_buffers():
        assert buffer.device.type != "meta", name
        assert torch.equal(buffer, buffers[name]), name


def test_presets_are_saved_in_full(tmp_path):
    """Every registered preset, with its real sizes, comes back equal."""
    for index, name in enumerate(model_types()):
        config = AutoConfig.for_model(name)
        folder = Path(tmp_path) / str(index)
        config.save_pretrained(folder)
        assert fields(AutoConfig.from_pretrained(folder)) == fields(config), name
        assert isinstance(config, XFormerConfig) and config.model_type == name


@pytest.mark.parametrize("name", list(model_types()))
def test_default_preset_builds(name):
    """The preset at its published size, without memory for it, in every shape of the family: other heads know nothing
    of its layers."""
    from hf_xformers.variants import config_class, family

    config, members = config_class(name)(), family(name)
    for head in [head for head in SHAPES.values() if head in members] or members:
        with torch.device("meta"):
            model = members[head](config)
        assert model.num_parameters() > 0, head
        assert model.config_class is config_class(name)
