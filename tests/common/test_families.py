"""Contract: each family by itself. Its components are tested elsewhere: here are its defaults, its names, and one
model that trains, is saved, comes back and writes."""

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_xformers import XFormerConfig
from hf_xformers.core.components import SLOTS, Spec
from hf_xformers.variants import config_class, family, model_types
from tests.common.cases import AUTO, CASES, SHAPES, defaults
from tests.common.test_training import loss_of
from tests.helpers import aligned, pad, tokens


def fields(config):
    """What a config says, without where it was read from."""
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


@pytest.mark.parametrize("name", list(model_types()))
def test_defaults(name, tmp_path):
    """At its real sizes a config comes back equal, and builds, here without memory."""
    config, members = AutoConfig.for_model(name), family(name)
    assert type(config) is config_class(name) and isinstance(config, XFormerConfig) and config.model_type == name
    config.save_pretrained(tmp_path)
    assert fields(AutoConfig.from_pretrained(tmp_path)) == fields(config)
    head = next((head for head in SHAPES.values() if head in members), *list(members)[:1])
    with torch.device("meta"):
        model = members[head](config)
    assert model.num_parameters() > 0 and model.config_class is config_class(name), head


def _own_shapes():
    """Each family and each mix once, in the shape that it has by itself where it is tested in that."""
    found = {}
    for case in CASES:
        config = defaults(case.config_class.model_type)
        own = "seq2seq" if config.is_encoder_decoder else "decoder" if config.is_decoder else "encoder"
        if case.name not in found or case.shape == own:
            found[case.name] = case
    return list(found.values())


@pytest.mark.parametrize("case", _own_shapes(), ids=str)
def test_smoke(case, tmp_path):
    model = case.build(strong=False, dtype=torch.float32).train()
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "left")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, ids, mask).backward()
    optimizer.step()
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    model.eval().save_pretrained(tmp_path)
    loaded, report = getattr(transformers, AUTO[case.head]).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) is case.family[case.head] and not any(report.values()), report
    buffers = dict(model.named_buffers())  # tables that a component computes for itself: loading builds without values
    for name, buffer in loaded.named_buffers():
        assert buffer.device.type != "meta" and torch.equal(buffer, buffers[name]), name
    read, text = loaded.config, (tmp_path / "config.json").read_text()
    assert type(read) is case.config_class and read.architectures == [type(model).__name__]
    read.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == text and fields(read) == fields(model.config)
    for view, again in zip(model.config.tower_configs(), read.tower_configs(), strict=True):
        for index in range(view.num_hidden_layers):
            specs = [getattr(again.layer(index), slot) for slot in SLOTS]
            assert all(isinstance(spec, Spec) for spec in specs)
            assert specs == [getattr(view.layer(index), slot) for slot in SLOTS]
    with torch.no_grad():
        assert torch.equal(case.run(aligned(loaded), ids, mask), case.run(model, ids, mask))
    if case.causal:
        settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        written = [
            model.generate(ids, attention_mask=mask, use_cache=use_cache, **settings) for use_cache in (True, False)
        ]
        assert torch.equal(*written) and written[0].shape[1] == 3 + (ids.shape[1] if case.shape == "decoder" else 1)
