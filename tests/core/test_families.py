"""Families: names, registration, what a head makes of a config."""

import dataclasses
import inspect
import re
import subprocess
import sys

import pytest
import torch
import transformers

import hf_xformers
from hf_xformers import VariantInfo, XFormerConfig, make_family
from hf_xformers.auto_classes import registered
from hf_xformers.core.components import SpecLike
from hf_xformers.families import ENCODER_HEADS, HEADS, references
from hf_xformers.modeling_base import XFormerPreTrainedModel
from hf_xformers.modeling_tower import XFormerTower
from hf_xformers.variants import config_class, family, model_types, public_names
from tests.helpers import tiny_fields


@pytest.mark.parametrize("name", list(model_types()))
def test_every_family(name):
    cls, members = config_class(name), family(name)
    assert cls.model_type == name and cls.__name__.endswith("Config")
    assert tuple(members) == cls.heads and "Model" in members
    prefix, inputs = cls.__name__.removesuffix("Config"), set(XFormerTower.names_of_inputs(cls()))
    for head, model_class in members.items():
        assert inputs <= set(inspect.signature(model_class.forward).parameters)  # by which Trainer keeps columns
        assert model_class.__name__ == prefix + head
        assert model_class.config_class is cls and issubclass(model_class, XFormerPreTrainedModel)
        assert model_class in registered(HEADS[head], cls)
    info = cls.info
    for text in (info.summary, info.paper, info.url, info.equation, info.cost, info.citation):
        assert text.strip()
    assert info.url.startswith("https://") and info.citation.startswith("@")


def test_references_are_those_that_are_cited():
    cited = {key.strip() for name in model_types() for key in config_class(name).info.cite.split(",")}
    assert cited - {""} == set(references())


def test_what_nobody_can_cite():
    with pytest.raises(ValueError, match=r"how to cite 'Nobody 2026'; give `cite`, or an entry as `bibtex`"):
        VariantInfo("turns", "Nobody 2026", "https://example.org", "x", "O(T)")


def test_unknown_head():
    with pytest.raises(ValueError, match="Unknown head 'ForTeaTasting'; heads are: Model, ForMaskedLM"):
        make_family(XFormerConfig, "XFormer", ("Model", "ForTeaTasting"), XFormerConfig.info)


def test_a_model_type_belongs_to_one_module():
    """Also where it is inherited by mistake."""
    for base, own in ((XFormerConfig, {}), (XFormerConfig, {"model_type": "bert"}), (config_class("xf_luna"), {})):
        taking = type("Taking", (base,), {"__module__": __name__, **own})
        with pytest.raises(ValueError, match=f"'{taking.model_type}' is already registered by .*; give Taking a"):
            make_family(taking, "Taking", ("Model",), config_class("xf_luna").info)
    assert type(transformers.AutoConfig.for_model("bert")) is transformers.BertConfig


def test_a_field_without_a_type():
    fields = {"model_type": "xf_untyped", "attention": "linformer", "__module__": __name__}
    with pytest.raises(ValueError, match="`attention` of Untyped has no type, .*; write `attention: SpecLike = ...`"):
        make_family(type("Untyped", (XFormerConfig,), fields), "XFUntyped", ("Model",), XFormerConfig.info)


def test_making_one():
    """A researcher's own variant, from one class and one call."""

    class TestingConfig(XFormerConfig):
        model_type = "xf_testing_family"
        position: SpecLike = "rotary"

    info = VariantInfo("turns", "Nobody 2026", "https://example.org", "x", "O(T)", "@misc{x}")
    made = make_family(TestingConfig, "XFTesting", ENCODER_HEADS, info)
    config = transformers.AutoConfig.for_model("xf_testing_family", **tiny_fields(TestingConfig))
    assert type(config) is TestingConfig and config.position.type == "rotary"
    model = transformers.AutoModelForMaskedLM.from_config(config)
    assert type(model) is made["ForMaskedLM"] and type(model).__name__ == "XFTestingForMaskedLM"
    assert "Turns (Nobody 2026)" in type(model).__doc__
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, config.vocab_size)
    assert made["Model"].__module__ == __name__
    assert family("testing_family") == made and config_class("testing_family") is TestingConfig


def test_parameters_of_the_vanilla_transformer():
    """Vaswani et al. 2017, base, with 37000 tokens: counted term by term, and 63,045,632 in all."""
    width, inner, vocabulary, layers = 512, 2048, 37000, 6
    attention, norm = 4 * width * width, 2 * width
    feedforward = 2 * width * inner + inner + width
    encoder = layers * (attention + feedforward + 2 * norm)
    decoder = layers * (2 * attention + feedforward + 3 * norm)
    with torch.device("meta"):
        model = family("xf_transformer")["ForSeq2SeqLM"](config_class("xf_transformer")())
    assert model.num_parameters() == vocabulary * width + encoder + decoder == 63_045_632


def test_public_classes_are_listed_before_they_are_loaded():
    """`dir` and `help` name every variant's classes, and every name is there."""
    code = (
        "import sys, hf_xformers; names = dir(hf_xformers); text = hf_xformers.__doc__; "
        "assert 'torch' not in sys.modules and not any(m.startswith('hf_xformers.variants.') for m in sys.modules); "
        "assert {'XFBertConfig', 'XFGPT2ForCausalLM', 'XFormerModel', 'Spec', 'convert_checkpoint'} <= set(names); "
        "assert 'XFLongformerForQuestionAnswering' in text and text.startswith('Transformer variants of')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for model_type, names in public_names().items():
        config = config_class(model_type)
        prefix = config.__name__.removesuffix("Config")
        listed = {*names, "XFormerConfig"}  # which is no family's own
        assert {config.__name__, *(prefix + head for head in config.heads)} <= listed <= set(dir(hf_xformers))
        assert all(getattr(hf_xformers, name).__name__ == name for name in names)


@pytest.mark.parametrize("model_type", model_types())
def test_configs_explain_their_fields(model_type):
    """Every field that is ours by name, and what a preset chooses with its value."""
    config = config_class(model_type)
    general, fields = (
        {
            field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(kind)
        }
        for kind in (XFormerConfig, config)
    )
    ours = [kind for kind in config.__mro__ if kind.__module__.startswith("hf_xformers")]
    names = {name for kind in ours for name in inspect.get_annotations(kind) if name in fields}
    assert not [name for name in names if not re.search(rf"\b{name}\b", config.__doc__)]
    for name in names:
        if name in general and fields[name] != general[name]:
            assert f"{name}: {fields[name]!r}" in config.__doc__
