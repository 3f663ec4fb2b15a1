"""Contract: what is saved comes back through the Auto classes, the same in class, config, names and outputs."""

import torch
import transformers
from transformers import AutoConfig

from tests.common.cases import AUTO, each_component
from tests.helpers import aligned, pad, tokens


def fields(config):
    """What a config says, without where it was read from."""
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


@each_component
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
    buffers = dict(model.named_buffers())  # tables that a component computes for itself: loading builds without values
    for name, buffer in loaded.named_buffers():
        assert buffer.device.type != "meta" and torch.equal(buffer, buffers[name]), name
    with torch.no_grad():
        assert torch.equal(case.run(aligned(loaded), ids, mask), expected)

    assert fields(loaded.config) == fields(model.config)
    assert type(loaded.config) is case.config_class and loaded.config.architectures == [type(model).__name__]

    # A new model from the saved config has the very same parameters, by name and shape.
    config = AutoConfig.from_pretrained(tmp_path)
    rebuilt = getattr(transformers, AUTO[case.head]).from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in rebuilt.state_dict().items()} == shapes
