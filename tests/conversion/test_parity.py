"""What converted models are besides equal in their outputs: tied, of a type, in memory of their own; what a wrong
table of tensors comes to; and text that beams write."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import hf_xformers
from hf_xformers.conversion import base, from_transformers, lookup, to_transformers
from tests.conversion.architectures import tiny
from tests.conversion.test_architectures import assert_same, differences, outputs

TOLERANCE = 1e-5


def test_left_padding_needs_no_position_ids_here():
    """transformers' GPT-2 counts padding unless it is given position ids; ours reads them off the mask."""
    case = tiny("GPT2LMHeadModel")
    model = case.make()
    ours = from_transformers(model)
    given = case.given("left")
    expected = outputs(model, given)["logits"]
    del given["position_ids"]
    assert float((outputs(ours, given)["logits"] - expected).abs().max()) < TOLERANCE
    assert float((outputs(model, given)["logits"] - expected).abs().max()) > 1e-2


def test_no_shared_memory():
    model = tiny("BertForMaskedLM").make()
    ours = from_transformers(model)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(bool(parameter.any()) for parameter in model.parameters())


def test_tying_follows_the_weights():
    for name, tied, form in (
        ("BertForMaskedLM", True, {}),
        ("BertForMaskedLM", False, {}),
        ("T5ForConditionalGeneration", True, {}),
        ("T5ForConditionalGeneration", False, {"feed_forward_proj": "gated-gelu"}),
    ):
        ours = from_transformers(tiny(name, tie_word_embeddings=tied, **form).make())
        table, output = ours.get_input_embeddings().weight, ours.get_output_embeddings().weight
        assert (table is output) == tied == ours.config.tie_word_embeddings, name
    # the flag of v1.1 is about scaling, and separate from tying
    assert from_transformers(tiny("T5ForConditionalGeneration").make()).config.head.scale is True
    assert ours.config.head.scale is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype):
    ours = from_transformers(tiny("GPT2LMHeadModel").make().to(dtype))
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    assert {parameter.dtype for parameter in to_transformers(ours).parameters()} == {dtype}


def test_float64_leaves_only_rounding():
    """In float64 the difference falls with the precision: the mapping is exact, not merely close. (T5's RMS norm takes
    its mean square in float32 in transformers, so that family keeps the rounding of float32.)"""
    for name in ("BertForPreTraining", "RobertaForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration"):
        case = tiny(name)
        model = case.make().double()
        found = differences(case.entry, model, from_transformers(model), case.given())
        assert max(found.values()) < 1e-12, found


# ---------------------------------------------------------------------------------------------------- broken tables


def with_group(converter, group, rules):
    return dataclasses.replace(converter, groups={**converter.groups, group: tuple(rules)})


@pytest.fixture
def broken(monkeypatch):
    """Puts a changed converter in place of a registered one."""

    def put(converter):
        lookup.converter_for(converter.model_type)
        monkeypatch.setitem(base._CONVERTERS, converter.model_type, converter)

    return put


def test_swapped_projections_are_seen(broken):
    """The parity test would notice two tensors of one shape under each other's names."""
    converter = lookup.converter_for("bert")
    rules = []
    for rule in converter.groups["backbone"](hf_xformers.XFBertConfig()):
        name = rule.ours[0]
        if "q_proj" in name or "k_proj" in name:
            swap = name.replace("q_proj", "#").replace("k_proj", "q_proj").replace("#", "k_proj")
            rule = dataclasses.replace(rule, ours=(swap,))
        rules.append(rule)
    broken(with_group(converter, "backbone", rules))
    case = tiny("BertForMaskedLM")
    model = case.make()
    with pytest.raises(AssertionError):
        assert_same(case.entry, model, from_transformers(model), case.given())


def test_a_missing_rule_is_an_error(broken):
    converter = lookup.converter_for("gpt2")
    rules = [rule for rule in converter.groups["backbone"] if "mlp.c_fc" not in rule.theirs[0]]
    broken(with_group(converter, "backbone", rules))
    with pytest.raises(ValueError, match=r"no place for: 'transformer\.h\.0\.mlp\.c_fc\.weight'"):
        from_transformers(tiny("GPT2LMHeadModel").make())


def test_a_wrong_layout_is_an_error(broken):
    converter = lookup.converter_for("gpt2")
    rules = [
        dataclasses.replace(rule, operation=base_copy) if "mlp.c_fc" in rule.theirs[0] else rule
        for rule in converter.groups["backbone"]
    ]
    broken(with_group(converter, "backbone", rules))
    with pytest.raises(ValueError, match=r"c_fc.weight' gives .*up_proj.weight the shape \[32, 48\]"):
        from_transformers(tiny("GPT2LMHeadModel").make())


base_copy = next(rule for rule in lookup.converter_for("gpt2").groups["backbone"]).operation


# ---------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_beams_agree(name):
    model = tiny(name).make(seed=5)
    ours = from_transformers(model)
    given = tiny(name).given("right" if model.config.is_encoder_decoder else "left")
    prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "no_repeat_ngram_size": 2}
    expected = model.generate(**prompt, **options)
    assert torch.equal(ours.generate(**prompt, **options), expected)
    assert torch.equal(to_transformers(ours).generate(**prompt, **options), expected)
    assert len(expected.unique()) > 2  # the text is not one token over and over


def test_generation_settings_travel():
    model = tiny("BartForConditionalGeneration").make()
    model.generation_config.update(num_beams=4, length_penalty=2.0, forced_bos_token_id=7)
    ours = from_transformers(model)
    assert ours.generation_config.num_beams == 4
    assert ours.generation_config.forced_eos_token_id == 2
    back = to_transformers(ours)
    old, new = model.generation_config.to_dict(), back.generation_config.to_dict()
    assert {**new, "_from_model_config": None} == {**old, "_from_model_config": None}
    fresh = hf_xformers.XFBartForSeq2SeqLM(copy.deepcopy(ours.config))
    assert fresh.generation_config.forced_eos_token_id is None
    assert to_transformers(fresh).generation_config.forced_eos_token_id is None
