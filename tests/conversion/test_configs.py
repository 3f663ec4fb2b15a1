"""Configs convert without loss, or not at all; presets have the published sizes."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

import hf_xformers
from hf_xformers import XFormerConfig
from hf_xformers.conversion import base, lookup, to_transformers
from hf_xformers.variants import config_class, family
from tests.conversion.architectures import architectures

FAMILIES = ("bert", "roberta", "roformer", "deberta-v2", "openai-gpt", "gpt2", "bart", "t5")
LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
OTHER_NAMES = {
    "hidden_act": "relu",
    "pooler_hidden_act": "tanh",
    "pooler_activation": "relu",
    "classifier_transform": "dense",
    "classifier_activation": "relu",
    "pos_att_type": ["p2c"],
    "activation_function": "relu",
    "afn": "silu",
    "feed_forward_proj": "gated-gelu",
    "summary_type": "last",
    "summary_activation": "tanh",
    "tag_decoder": "crf",
    "pretraining": {"text_contrast": {"loss": "ctl"}},
    "distinct_layers": 1,
    "sharing": "cycle",
}


def another(name, value, hint):
    """Some other valid value of a field with this annotation."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and not ("drop" in name or name.endswith("pdrop")):
        return value * 2 if value > 2 else value + 2
    if isinstance(value, (int, float)):
        return value + 0.25 if value <= 1 else value * 2
    if value is None:
        return 3 if "int" in hint and "float" not in hint else 0.25
    raise AssertionError(f"say in OTHER_NAMES what {name}={value!r} may be changed to")


def fates(converter, make, other_values=MappingProxyType({})):
    """What becomes of every field of their config, changed alone: by fate (refused, noted, unread), the names; a field
    that comes back is in none."""
    start, found = make(), {"refused": set(), "noted": set(), "unread": set()}
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for field in dataclasses.fields(type(start)):
        name, notes = field.name, []
        if name in inherited:
            continue
        given = other_values[name] if name in other_values else another(name, getattr(start, name), str(field.type))
        try:
            changed = make(**{name: given})
            ours = converter.config_to_ours(changed, notes)
        except (ValueError, TypeError, StrictDataclassError) as error:  # by us, or by their config itself
            found["refused"].add(name)
            assert str(error)
            continue
        if getattr(converter.config_to_theirs(ours), name) == getattr(changed, name):
            continue
        if any(name in note for note in notes):
            found["noted"].add(name)
        else:
            assert name in converter.unread, name
            found["unread"].add(name)
    return found


# Fields of ours that change no output of a converted model: how a fresh one starts, how padding is skipped, in which
# order layers are shared where they are, what a classifier (where one is converted, they are checked) or generation
# reads, and the parts that only two towers have.
START = {"initializer", "initializer_range", "initializer_factor", "unpad_inputs", "sharing"}
CHECKED_LATER = {f"classifier_{name}" for name in ("pooling", "transform", "activation", "bias")}
CHECKED_LATER |= {"add_pooler", "pooler_activation", "tag_decoder"}
# Of heads that have no counterpart, or whose tensors have another shape.
OF_HEADS = {"pretraining"}
OF_INPUTS = {"first_position", "labels_in_place"}  # reported
SECOND_TOWER = {"cross_attention", "decoder", "num_decoder_layers", "decoder_vocab_size", "decoder_start_token_id"}
HARMLESS = {
    **dict.fromkeys(("bert", "roberta", "gpt2"), SECOND_TOWER),
    "roformer": SECOND_TOWER | {"classifier_dropout"},
    "deberta-v2": SECOND_TOWER | {"use_cache"},
    "openai-gpt": SECOND_TOWER | {"use_cache"},
    "bart": set(),
    # T5 has no position table, and says by its weights whether they are tied
    "t5": {"max_position_embeddings", "tie_word_embeddings"},
}
ALWAYS_REFUSED = {"attention", "embedding", "feedforward", "normalization", "position", "residual"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_of_ours_is_lost(model_type):
    """The same in the other direction, component slots included."""
    converter = lookup.converter_for(model_type)
    start = converter.config_to_ours(architectures()[model_type].config())
    slots = {
        "embedding": {"type": "token", "normalize": not start.embedding.normalize},
        "position": "sinusoidal_absolute",
        "attention": {**start.attention.to_dict(), "scale": 0.3},
        "cross_attention": {**start.cross_attention.to_dict(), "scale": 0.3},
        "normalization": "layer_norm" if model_type == "t5" else "rms_norm",
        "residual": "post_ln" if start.residual.type == "pre_ln" else "pre_ln",
        "feedforward": {"type": "swiglu", "bias": not start.feedforward.bias},
        "head": {"type": "linear", "bias": True, "scale": True},
        "decoder": {"intermediate_size": 96},
    }
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    refused, lost = set(), set()
    for field in dataclasses.fields(type(start)):
        name = field.name
        if name in inherited or name in ("block", "stack", "per_layer_config"):
            continue
        if name in slots:
            value = slots[name]
        elif name == "initializer":
            value = "xavier"
        elif name == "classifier_pooling":
            value = "mean"
        elif name == "distinct_layers":
            value = 1
        elif name == "sharing":
            value = "cycle"
        elif name == "layer_map":
            if start.is_encoder_decoder:  # its towers may differ in depth
                continue
            value = [0] * start.num_hidden_layers
        elif name == "share":  # nothing by itself; what is shared is refused above
            continue
        elif name in ("num_key_value_heads", "head_dim"):
            value = 2
        elif name == "is_decoder" and start.is_encoder_decoder:
            continue
        else:
            value = another(name, getattr(start, name), str(field.type))
        fields = start.to_dict()
        fields.pop("model_type")
        notes: list[str] = []
        try:
            changed = type(start)(**{**fields, name: value})
            back = converter.config_to_ours(converter.config_to_theirs(changed, notes))
        except ValueError:
            refused.add(name)
            continue
        same = getattr(back, name) == getattr(changed, name) or any(name in note for note in notes)
        if name == "head_dim":
            same = back.head_width == changed.head_width
        if not same:
            lost.add(name)
    assert refused >= ALWAYS_REFUSED | {"num_key_value_heads"}
    assert lost <= HARMLESS[model_type] | START | CHECKED_LATER | OF_HEADS | OF_INPUTS


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("bert", {"position": "rotary"}, "position='rotary'.* has no counterpart in transformers"),
        ("bert", {"head_dim": 4}, "head_width=4"),
        ("bert", {"is_encoder_decoder": True}, "is_encoder_decoder=True has no counterpart"),
        ("bert", {"per_layer_config": {0: {"intermediate_size": 8}}}, "`per_layer_config` cannot be converted"),
        ("bert", {"add_pooler": True, "pooler_activation": "gelu"}, "pooler_activation='gelu'.* has 'tanh'"),
        ("roformer", {"position": "rotary"}, "position='rotary' {'theta': 10000.0, .*'layout': 'half'"),
        ("roformer", {"add_pooler": True}, "pooler_activation='tanh'.* has 'gelu'"),
        ("deberta", {}, "stack='enhanced_mask_decoder'.* has 'plain'"),
        ("deberta", {"stack": "plain", "is_decoder": True}, "is_decoder=True"),
        ("deberta", {"stack": "plain", "position": "rotary"}, "position='rotary'.* has 'deberta'"),
        ("roberta", {"position": {"type": "learned_absolute", "offset": 0}}, "position='learned_absolute'"),
        ("gpt", {"intermediate_size": 100}, "intermediate_size=100"),
        ("gpt", {"feedforward": {"type": "gelu", "approximate": "none"}}, "no activation 'gelu'"),
        ("bart", {"decoder": {"position": "rotary"}}, "position='rotary'"),
        ("bart", {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06"),
        ("t5", {"attention": {"type": "dense", "bias": False}}, "attention='dense'"),
    ],
)
def test_refusals_name_the_part(variant, changes, message):
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=50)
    config = config_class(variant)(**{**sizes, **changes})
    with pytest.raises(ValueError, match=message):
        lookup.converter_for(f"xf_{variant}").config_to_theirs(config)


def test_sources_that_do_not_convert():
    def refuse(config, message):
        with pytest.raises(ValueError, match=message):
            lookup.converter_for(config.model_type).config_to_ours(config)

    refuse(transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True")
    refuse(transformers.BertConfig(is_decoder=True, add_cross_attention=True), "add_cross_attention=True")
    refuse(transformers.Qwen2Config(is_causal=False), "is_causal=False")
    refuse(transformers.BertConfig(is_causal=True), "is_causal=True")
    refuse(transformers.BartConfig(is_causal=False), "is_causal=False")
    deberta = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p"]}
    for changes, message in (
        ({"relative_attention": False}, "relative_attention=False"),
        ({"pos_att_type": None}, "pos_att_type=None"),
        ({"conv_kernel_size": 4}, "conv_kernel_size=4 .* even kernel"),
        ({"embedding_size": 8}, "embedding_size=8"),
        ({"attention_head_size": 8}, "attention_head_size=8"),
    ):
        refuse(transformers.DebertaV2Config(**{**deberta, **changes}), message)
    refuse(transformers.RoFormerConfig(summary_type="mean"), "summary_type='mean'")
    refuse(transformers.RoFormerConfig(is_decoder=True, add_cross_attention=True), "add_cross_attention=True")
    refuse(transformers.BertConfig(hidden_act="mish"), "activation 'mish'")
    refuse(transformers.RobertaConfig(pad_token_id=None), "pad_token_id")
    refuse(transformers.T5Config(feed_forward_proj="gated-mish"), "gated .*'mish'")


NEAR = {
    **{"olmo": "olmo2", "seed_oss": "llama", "arcee": "llama", "glm4": "llama", "nemotron": "llama"},
    **{"persimmon": "stablelm", "codegen": "gptj", "gpt_neox_japanese": "gpt_neox", "gemma3n_text": "gemma3_text"},
    **{"helium": "llama", "exaone4": "qwen2", "granitemoe": "granite", "plbart": "bart", "pegasus_x": "pegasus"},
    **{"blenderbot": "bart", "bert-generation": "bert", "xlm-roberta-xl": "xlm-roberta", "rembert": "bert"},
    "falcon_mamba": "mamba2",
    **dict.fromkeys(("mpt", "jamba", "clip", "whisper", "rwkv"), None),
}


@pytest.mark.parametrize("model_type", NEAR)
def test_other_model_types_of_transformers(model_type):
    """Refused, with the families that have nearly their configs, where there are any."""
    near = NEAR[model_type]
    with pytest.raises(ValueError, match=f"No conversion for model type '{model_type}'; of the families") as caught:
        lookup.converter_for(model_type)
    said = str(caught.value).split(". `hf-xformers")[0]
    assert said.endswith("none is near to it") if near is None else near in said.split(": ")[1].split(", ")


def test_layers_that_differ_where_a_family_has_them_alike():
    layers = {1: {"feedforward": {"type": "geglu", "bias": False}}}
    sizes = dict(vocab_size=20, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8)
    parts = dict(
        normalization="rms_norm", residual="pre_ln", position="rotary", attention={"type": "dense", "bias": False}
    )
    config = XFormerConfig(
        **sizes, **parts, is_decoder=True, feedforward={"type": "swiglu", "bias": False}, per_layer_config=layers
    )
    with pytest.raises(ValueError, match="layers of a 'smollm3' model do not differ in one of feedforward"):
        lookup.converter_for("smollm3").config_to_theirs(config)


def test_unknown_model_types_are_listed():
    with pytest.raises(
        ValueError, match="No conversion for model type 'bret'; did you mean 'bert'[?] These convert: "
    ):
        lookup.converter_for("bret")
    model = hf_xformers.XFormerModel(
        XFormerConfig(vocab_size=20, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="No family of transformers has these components; .* gpt_neo, "):
        to_transformers(model)


def test_pooling_that_differs_is_refused():
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=50, intermediate_size=128)
    model = hf_xformers.XFGPT2ForSequenceClassification(
        hf_xformers.XFGPT2Config(**sizes, classifier_pooling="mean", bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(ValueError, match="classifier_pooling='mean' has no counterpart"):
        to_transformers(model)
    assert type(to_transformers(model, head="Model")).__name__ == "GPT2Model"
    bert = hf_xformers.XFBertForSequenceClassification(hf_xformers.XFBertConfig(**sizes, add_pooler=False))
    with pytest.raises(ValueError, match="without a pooler"):
        to_transformers(bert)
    transformed = hf_xformers.XFBertForSequenceClassification(
        hf_xformers.XFBertConfig(**sizes, add_pooler=True, classifier_transform="dense")
    )
    with pytest.raises(ValueError, match="classifier_transform='dense' has no counterpart: BertForSequenceClass"):
        to_transformers(transformed)
    with torch.no_grad():
        model.classifier.bias.fill_(1.0)
    model.config.classifier_pooling = "auto"
    with pytest.raises(ValueError, match=r"'classifier\.bias' cannot be converted: it is not zero"):
        to_transformers(model)


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "fields", "parameters"),
    [
        ("XFBertModel", {}, 109_482_240),
        ("XFBertForPreTraining", {}, 110_106_428),
        ("XFBertForPreTraining", LARGE, 336_226_108),
        ("XFRobertaForMaskedLM", {}, 124_697_433),
        ("XFGPTForCausalLM", {}, 116_534_784),
        ("XFGPT2ForCausalLM", {}, 124_439_808),
        ("XFGPT2ForCausalLM", LARGE, 354_823_168),
        # the output bias is a parameter here and a buffer in transformers: 50,265 more than 139,420,416
        ("XFBartForSeq2SeqLM", {}, 139_420_416 + 50_265),
        ("XFT5ForSeq2SeqLM", {}, 60_506_624),
        ("XFT5ForSeq2SeqLM", BASE, 222_903_552),
        (  # T5 v1.1 base: gated, its own output table
            "XFT5ForSeq2SeqLM",
            {
                **{**BASE, "intermediate_size": 2048, "head": "linear", "tie_word_embeddings": False},
                "feedforward": {"type": "geglu", "approximate": "tanh", "bias": False},
            },
            222_903_552 + 24_674_304 + 24 * (3 * 2048 - 2 * 3072) * 768,
        ),
    ],
)
def test_parameter_counts(name, fields, parameters):
    """The published sizes, counted without memory, by ours and by transformers' class for the same config."""
    model_class = getattr(hf_xformers, name)
    config = model_class.config_class(**fields)
    with torch.device("meta"):
        assert count(model_class(config)) == parameters
        converter = lookup.converter_for(config.model_type)
        head = next(head for head, made in family(converter.variant).items() if made is model_class)
        theirs = getattr(transformers, converter.head_of_ours(head, config).theirs)
        theirs = theirs(converter.config_to_theirs(config))
    own_table = 0 if config.tie_word_embeddings or config.model_type != "xf_t5" else 768 * 32128
    buffer = 50_265 if config.model_type == "xf_bart" else 0
    # a fresh T5 of transformers is tied; a checkpoint may not be
    assert count(theirs) + own_table + buffer == parameters


def test_a_chain_of_tags_has_no_counterpart():
    start = lookup.converter_for("bert").config_to_ours(architectures()["bert"].config())
    fields = {**start.to_dict(), "tag_decoder": "crf"}
    fields.pop("model_type")
    model = hf_xformers.XFBertForTokenClassification(type(start)(**fields))
    with pytest.raises(ValueError, match="tag_decoder='crf' has no counterpart: BertForTokenClassification labels"):
        to_transformers(model)
    assert type(to_transformers(model, head="Model")).__name__ == "BertModel"


@pytest.mark.parametrize("model_type", ["modernbert", "eurobert", "longformer", "xlm"])
def test_ids_of_special_tokens_come_back(model_type):
    """Those that no model of ours reads, too: another tokenizer's would lie beyond the vocabulary."""
    theirs = transformers.CONFIG_MAPPING[model_type]
    names = [entry.name for entry in dataclasses.fields(theirs) if entry.name.endswith("_token_id")]
    ids = {name: 3 + number for number, name in enumerate(names)}
    config = theirs(vocab_size=40, **ids)
    converter = base.converters()[model_type]
    ours = converter.config_to_ours(config)
    back = converter.config_to_theirs(type(ours).from_dict(ours.to_dict()))
    assert {name: getattr(back, name) for name in names} == ids
