"""Every variant can be compared, or says in one sentence why not; the baseline is dense attention of the same
shape."""

from __future__ import annotations

import pytest
import torch

from hf_xformers.benchmark.entries import SHAPES, Entry, baseline, choose_shapes, dense_twin, make_config
from hf_xformers.benchmark.steps import HEADS, WIDTH, attention_of, layer_config, step
from hf_xformers.training.building import longest_input
from hf_xformers.variants import config_class, model_types

TEXT = [name for name in model_types() if config_class(name).modality == "text"]
# Their attention lives inside their stack.
INSIDE = {"xf_conditional_computation_transformer", "xf_feedback_transformer", "xf_deberta"}


@pytest.mark.parametrize("variant", TEXT)
def test_layer_of_every_variant(variant):
    entry = Entry("x", variant)
    for shape in entry.shapes():
        if variant == "xf_axial_transformer":
            continue  # a layer alone reads rows or columns, which is no attention
        if (variant, shape) == ("xf_dartsformer", "seq2seq"):
            with pytest.raises(ValueError, match="in 3 parts here, which do not divide it"):  # as a decoder has them
                layer_config(entry, shape, 12)
            continue
        config = layer_config(entry, shape, 12)
        assert (config.hidden_size, config.num_attention_heads) == (WIDTH, HEADS)
        assert config.attention_probs_dropout_prob == 0
        if variant in INSIDE:
            with pytest.raises(ValueError, match="works inside its stack.*--level model"):
                step(entry, shape, 12)()
        else:
            step(entry, shape, 12)()


@pytest.mark.parametrize(
    "variant", ["xf_performer", "xf_t5", "xf_transformer_xl", "xf_roberta", "xf_switch_transformer"]
)
def test_whole_models(variant):
    entry = Entry("x", variant, fields={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    for shape in entry.shapes():
        config = make_config(entry, shape, 20)
        limit = longest_input(config)
        assert limit is None or limit >= 20
        assert config.is_decoder is (shape == "decoder") and config.is_encoder_decoder is (shape == "seq2seq")
        step(entry, shape, 20, level="model", batch_size=2)()


def test_a_step_computes_gradients_and_forgets_them(monkeypatch):
    seen = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: (seen.append(self.shape), backward(self)))
    run = step(Entry("x", "xf_longformer"), "encoder", 8)
    run(), run()
    assert len(seen) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_baseline_is_dense(shape):
    entry = baseline(shape)
    assert entry.label == "dense" and shape in entry.shapes()
    spec, index = attention_of(layer_config(entry, shape, 8).tower("trunk"))
    assert (spec.type, index) == ("dense", 0)


@pytest.mark.parametrize("name, shape", [("longformer", "encoder"), ("bigbird", "seq2seq"), ("performer", "decoder")])
def test_a_twin_differs_in_attention_alone(name, shape):
    entry = Entry("x", f"xf_{name}", {"feedforward": {"type": "relu"}}, {"num_key_value_heads": 4})
    own, other = (make_config(one, shape, 32).to_dict() for one in (entry, dense_twin(entry, shape, 32)))
    assert {key for key in own if own[key] != other[key]} <= {"attention", "decoder"}
    assert other["attention"]["type"] == "dense" != own["attention"]["type"]


def test_layer_that_differs_is_the_one_measured():
    spec, index = attention_of(layer_config(Entry("x", "xf_gpt3_alternating"), "decoder", 8))
    assert (spec.type, index) == ("band_attention", 1)


def test_components_of_an_entry():
    entry = Entry("x", "xf_longformer", {"attention": {"attention_window": 6}}, {"num_key_value_heads": 4})
    config = layer_config(entry, "encoder", 8)
    assert (
        config.attention.attention_window == 6
        and config.key_value_heads == 4
        and config.attention.type == "longformer"
    )


def shapes(*variants, **more):
    return choose_shapes([Entry(name, f"xf_{name}") for name in variants], **more)


def test_shapes():
    assert shapes("longformer", "performer") == {"longformer": "encoder", "performer": "encoder"}
    assert shapes("gpt2", "performer") == {"gpt2": "decoder", "performer": "decoder"}
    assert shapes("gpt2", "funnel_transformer") == {"gpt2": "decoder", "funnel_transformer": "encoder"}
    assert shapes("linformer", wanted="encoder") == {"linformer": "encoder"}
    assert shapes("performer", order=("decoder", "encoder", "seq2seq")) == {"performer": "decoder"}
    with pytest.raises(
        ValueError, match="'xf_funnel_transformer' has no decoder class .ForCausalLM.; it is made for encoder"
    ):
        shapes("funnel_transformer", wanted="decoder")
    with pytest.raises(ValueError, match="'xf_vision_transformer' reads images"):
        shapes("vision_transformer")
