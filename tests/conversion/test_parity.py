"""A converted model computes what the original does, with padding, for every class, and converts back to it
exactly."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import hf_xformers
from hf_xformers.conversion import base, from_transformers, lookup, to_transformers

TOLERANCE = 1e-5
SINGLE = (
    "logits",
    "reconstruction",
    "loss",
    "pooler_output",
    "prediction_logits",
    "seq_relationship_logits",
    "sop_logits",
    "start_logits",
    "end_logits",
)
ROWS = ("last_hidden_state", "encoder_last_hidden_state")
LISTS = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")


def valid(tensor, name, given):
    """The part of an output that belongs to real tokens. A pooler reads the first token, which must be real. Images
    are real everywhere."""
    if "attention_mask" not in given:
        return tensor
    mask = given["attention_mask"].bool()
    pooled = name in ("pooler_output", "seq_relationship_logits", "sop_logits") or (
        name == "logits" and tensor.ndim == 2
    )
    if pooled and not mask[..., 0].all():
        return (
            tensor[mask[..., 0]]
            if tensor.shape[: mask.ndim - 1] == mask.shape[:-1]
            else tensor[mask[..., 0].flatten()]
        )
    if "decoder_attention_mask" in given and not name.startswith("encoder"):
        mask = given["decoder_attention_mask"].bool()
    if mask.ndim == 3:  # multiple choice runs its choices as rows
        mask = mask.flatten(0, 1)
    return tensor[mask] if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape else tensor


def outputs(model, given):
    with torch.no_grad():
        out = model(**given, output_hidden_states=True)
    found = {name: out[name] for name in (*SINGLE, *ROWS) if out.get(name) is not None}
    for name in LISTS:
        for index, tensor in enumerate(out.get(name) or ()):
            found[f"{name}.{index}"] = tensor
    return {name: valid(tensor, name, given) for name, tensor in found.items()}


def largest_difference(theirs, ours, given):
    """Over everything that both models return; heads that did not convert are left out by name."""
    expected, got = outputs(theirs, given), outputs(ours, given)
    shared = expected.keys() & got.keys()
    assert {name.split(".")[0] for name in shared} & {*SINGLE, *ROWS, *LISTS}
    for name in shared:
        assert expected[name].shape == got[name].shape, name
        assert expected[name].isfinite().all(), name
    return {name: float((expected[name] - got[name]).abs().max()) for name in shared}


def assert_parity(theirs, ours, given, ignored=()):
    differences = largest_difference(theirs, ours, given)
    wrong = {name: value for name, value in differences.items() if not value < TOLERANCE and name not in ignored}
    assert not wrong, wrong
    return differences


HEAD_OUTPUTS = ("logits", "loss")


def seq2seq_ends(case, model, given, side):
    """transformers' encoder-decoder classifiers want the same number of end tokens in every row."""
    if case.two_towers and "SequenceClassification" in case.theirs:
        given["input_ids"][:, 0 if side == "right" else -1] = model.config.eos_token_id


def test_outputs_agree(padded_case):
    case, side = padded_case
    model = case.make()
    ours = from_transformers(model)
    assert type(ours).__name__ == case.ours
    assert not ours.training
    given = case.inputs(left=side == "left")
    seq2seq_ends(case, model, given, side)
    # what such a case drops is its head, but for a second head, and the cross-attention of a decoder by itself
    dropped_head = not case.complete and not any(name in case.theirs for name in ("DoubleHeads", "CausalLM"))
    names = assert_parity(model, ours, given, ignored=HEAD_OUTPUTS if dropped_head else ())
    assert any("hidden" in name for name in names)
    if case.complete and case.labels(given) and not (side == "left" and case.reads_first_token):
        names = assert_parity(model, ours, case.labelled(given))
        assert "loss" in names


def test_round_trip_is_exact(complete_case):
    model = complete_case.make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    back = to_transformers(from_transformers(model))
    assert type(back) is type(model)
    after = back.state_dict()
    assert after.keys() == before.keys()
    different = {name for name in before if not torch.equal(before[name], after[name])}
    # an untied BERT has a second output bias that nothing reads; it comes back as the first
    unread = set() if model.config.tie_word_embeddings else {"cls.predictions.bias"}
    assert different <= unread
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())  # source untouched
    ignored = {"transformers_version", "architectures", "dtype", "_name_or_path"}
    old, new = model.config.to_dict(), back.config.to_dict()
    assert {k: v for k, v in old.items() if k not in ignored} == {k: v for k, v in new.items() if k not in ignored}


def test_ours_first(complete_case):
    """A model that starts here goes there with the same outputs, and comes back exactly."""
    template = from_transformers(complete_case.make())
    torch.manual_seed(3)
    ours = type(template)(template.config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if complete_case.theirs in ("GPT2ForSequenceClassification", "OpenAIGPTForSequenceClassification"):
            ours.classifier.bias.zero_()  # theirs has none
    ours.eval()
    theirs = to_transformers(ours)
    assert type(theirs).__name__ == complete_case.theirs
    given = complete_case.inputs()
    assert_parity(theirs, ours, complete_case.labelled(given))
    again = from_transformers(theirs).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_left_padding_needs_no_position_ids_here(cases):
    """transformers' GPT-2 counts padding unless it is given position ids; ours reads them off the mask."""
    case = cases["GPT2LMHeadModel"]
    model = case.make()
    ours = from_transformers(model)
    given = case.inputs(left=True)
    expected = outputs(model, given)["logits"]
    del given["position_ids"]
    assert float((outputs(ours, given)["logits"] - expected).abs().max()) < TOLERANCE
    assert float((outputs(model, given)["logits"] - expected).abs().max()) > 1e-2


def test_no_shared_memory(cases):
    model = cases["BertForMaskedLM"].make()
    ours = from_transformers(model)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(bool(parameter.any()) for parameter in model.parameters())


def test_tying_follows_the_weights(cases):
    for name, tied in {
        "BertForMaskedLM": True,
        "BertForMaskedLM-hidden_act=gelu_new-tie_word_embeddings=False": False,
        "T5ForConditionalGeneration": True,
        "T5ForConditionalGeneration-feed_forward_proj=gated-gelu": False,
    }.items():
        ours = from_transformers(cases[name].make())
        table, output = ours.get_input_embeddings().weight, ours.get_output_embeddings().weight
        assert (table is output) == tied == ours.config.tie_word_embeddings, name
    # the flag of v1.1 is about scaling, and separate from tying
    assert from_transformers(cases["T5ForConditionalGeneration"].make()).config.head.scale is True
    assert ours.config.head.scale is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept(cases, dtype):
    ours = from_transformers(cases["GPT2LMHeadModel"].make().to(dtype))
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    assert {parameter.dtype for parameter in to_transformers(ours).parameters()} == {dtype}


def test_float64_leaves_only_rounding(cases):
    """In float64 the difference falls with the precision: the mapping is exact, not merely close. (T5's RMS norm takes
    its mean square in float32 in transformers, so that family keeps the rounding of float32.)"""
    for name in ("BertForPreTraining", "RobertaForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration"):
        case = cases[name]
        model = case.make().double()
        differences = largest_difference(model, from_transformers(model), case.inputs())
        assert max(differences.values()) < 1e-12, differences


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


def test_swapped_projections_are_seen(cases, broken):
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
    case = cases["BertForMaskedLM"]
    model = case.make()
    with pytest.raises(AssertionError):
        assert_parity(model, from_transformers(model), case.inputs())


def test_a_missing_rule_is_an_error(cases, broken):
    converter = lookup.converter_for("gpt2")
    rules = [rule for rule in converter.groups["backbone"] if "mlp.c_fc" not in rule.theirs[0]]
    broken(with_group(converter, "backbone", rules))
    with pytest.raises(ValueError, match=r"no place for: 'transformer\.h\.0\.mlp\.c_fc\.weight'"):
        from_transformers(cases["GPT2LMHeadModel"].make())


def test_a_wrong_layout_is_an_error(cases, broken):
    converter = lookup.converter_for("gpt2")
    rules = [
        dataclasses.replace(rule, operation=base_copy) if "mlp.c_fc" in rule.theirs[0] else rule
        for rule in converter.groups["backbone"]
    ]
    broken(with_group(converter, "backbone", rules))
    with pytest.raises(ValueError, match=r"c_fc.weight' gives .*up_proj.weight the shape \[32, 48\]"):
        from_transformers(cases["GPT2LMHeadModel"].make())


base_copy = next(rule for rule in lookup.converter_for("gpt2").groups["backbone"]).operation


# ---------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "BartForConditionalGeneration",
        "T5ForConditionalGeneration",
        "T5ForConditionalGeneration-feed_forward_proj=gated-gelu",
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "no_repeat_ngram_size": 2}], ids=["greedy", "beam"])
def test_generation_agrees(cases, name, options):
    case = cases[name]
    model = case.make(seed=5)
    ours = from_transformers(model)
    given = case.inputs(left=case.causal)
    prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False, **options)
    assert torch.equal(ours.generate(**prompt, max_new_tokens=8, do_sample=False, **options), expected)
    assert torch.equal(
        to_transformers(ours).generate(**prompt, max_new_tokens=8, do_sample=False, **options), expected
    )
    assert len(expected.unique()) > 2  # the text is not one token over and over


def test_generation_settings_travel(cases):
    model = cases["BartForConditionalGeneration"].make()
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
