"""XFormerConfig: slots, geometry, refusals, towers, layers that differ, serialisation."""

import copy
import json
import math
import pickle
from dataclasses import dataclass

import pytest
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM, build_spec
from hf_xformers.attention.shared.spec import AttentionSpec
from hf_xformers.core.components import SLOTS, Spec
from hf_xformers.variants import config_class, family

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=16)


def test_a_slot_takes_name_dict_or_spec():
    by_name = XFormerConfig(position="rotary")
    by_dict = XFormerConfig(position={"type": "rotary", "theta": 10000.0})
    by_spec = XFormerConfig(position=build_spec("position", "rotary"))
    assert by_name.position == by_dict.position == by_spec.position
    assert isinstance(by_name.position, Spec) and by_name.position.theta == 10000.0
    assert by_name.to_dict() == by_dict.to_dict() == by_spec.to_dict()
    by_name.position = {"type": "rotary", "fraction": 0.5}
    assert by_name.position.fraction == 0.5 and by_dict.position.fraction == 1.0


def test_every_slot_has_a_default():
    config = XFormerConfig()
    for slot in SLOTS:
        spec = getattr(config, slot)
        assert isinstance(spec, Spec) and SLOTS[spec.slot] is SLOTS[slot]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"attention": "dens"},
            ValueError,
            r"Unknown attention component 'dens'. Did you mean 'dense'\? Known names: .*dense",
        ),
        ({"attention": {"type": "dense", "scal": 1}}, ValueError, "Unknown field 'scal' .*mean 'scale'.*bias, scale"),
        ({"stack": {"type": "plain", "x": 1}}, ValueError, "Unknown field 'x' of stack 'plain'. Its fields are: none"),
        (
            {"attention": {"type": "dense", "bias": "yes"}},
            TypeError,
            "attention 'dense'.*'bias' expected bool, got str",
        ),
        ({"position": {"type": "rotary", "layout": "x"}}, TypeError, "'layout' expected one of .*'half'.*got x"),
        ({"position": {"type": "learned_absolute", "offset": 1.5}}, TypeError, "'offset' expected int, got float"),
        ({"attention": 3}, TypeError, "'attention' .*3"),
        ({"attention": {"bias": True}}, ValueError, "`attention` needs a string under 'type'"),
        ({"attention": {"type": 3}}, ValueError, "`attention` needs a string under 'type'"),
        ({"attention": build_spec("position", "rotary")}, TypeError, "`attention` was given the position .*'rotary'"),
        ({"hidden_size": "16"}, TypeError, "'hidden_size' expected int, got str"),
        ({"hidden_size": 16.0}, TypeError, "'hidden_size' expected int, got float"),
        ({"num_hidden_layers": True}, TypeError, "'num_hidden_layers' expected int, got bool"),
        ({"tie_word_embeddings": "no"}, TypeError, "'tie_word_embeddings' expected bool, got str"),
        ({"initializer": "uniform"}, TypeError, "'initializer' expected one of .*'xavier'.*got uniform"),
        ({"hiden_size": 16}, ValueError, "has no field 'hiden_size'; did you mean 'hidden_size'"),
        ({"attentions": "dense"}, ValueError, "has no field 'attentions'; did you mean 'attention'"),
        ({"vocab_size": 0}, ValueError, "`vocab_size` must be at least 1, got 0"),
        ({"head_dim": 0}, ValueError, "`head_dim` must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, ValueError, "`num_hidden_layers` must be at least 1, got 0"),
        ({"num_hidden_layers": -1}, ValueError, "`num_hidden_layers` must be at least 1, got -1"),
        ({"num_decoder_layers": 0}, ValueError, "`num_decoder_layers` must be at least 1, got 0"),
        ({"type_vocab_size": -1}, ValueError, "`type_vocab_size` must not be negative, got -1"),
        ({"chunk_size_feed_forward": -1}, ValueError, "`chunk_size_feed_forward` must not be negative, got -1"),
        ({"initializer_range": math.nan}, ValueError, "`initializer_range` must not be negative, got nan"),
        ({"hidden_size": 18}, ValueError, "18 is not a multiple of `num_attention_heads` 4; .*set `head_dim`"),
        ({"num_key_value_heads": 3}, ValueError, "`num_key_value_heads` 3 must divide `num_attention_heads` 4"),
        ({"num_key_value_heads": 0}, ValueError, "`num_key_value_heads` 0 must divide"),
        ({"hidden_dropout_prob": 1.0}, ValueError, r"`hidden_dropout_prob` is a probability in \[0, 1\), got 1.0"),
        ({"classifier_dropout": -0.5}, ValueError, r"`classifier_dropout` is a probability .*got -0.5"),
        ({"decoder": {"attentio": "dense"}}, ValueError, "`decoder` overrides 'attentio', .*did you mean 'attention'"),
        ({"decoder": {"hidden_size": 8}}, ValueError, "`decoder` overrides 'hidden_size', which both towers share"),
        ({"decoder": {"position": "rotery"}}, ValueError, "Unknown position component 'rotery'.*'rotary'"),
        ({"per_layer_config": {0: {"attentio": "dense"}}}, ValueError, r"`per_layer_config\[0\]`.*mean 'attention'"),
        ({"per_layer_config": {0: {"feedforward": "rel"}}}, ValueError, "Unknown feedforward component 'rel'.*'relu'"),
        ({"per_layer_config": {7: {"feedforward": "relu"}}}, ValueError, "overrides layer 7, but there are 2"),
        ({"per_layer_config": {1: {"num_attention_heads": 3}}}, ValueError, "`num_attention_heads` 3"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_mistakes(fields, kind, message):
    with pytest.raises(kind, match=message):
        XFormerConfig(**{**SMALL, **fields})


def test_mistakes_after_the_start():
    config = XFormerConfig(**SMALL)
    with pytest.raises(ValueError, match="Unknown attention component"):
        config.attention = "dens"
    with pytest.raises(TypeError, match="expected int, got str"):
        config.hidden_size = "16"
    with pytest.raises(TypeError, match="expected float"):
        config.layer_norm_eps = "small"
    assert config.attention.type == "dense" and config.hidden_size == 16


@strict
@dataclass(kw_only=True)
class Limited(AttentionSpec):
    """A mechanism that can do nothing beyond encoding, for the refusals below."""

    slot, type = "attention", "limited"
    acts = frozenset()
    why_not = {"causal": "It mixes all tokens at once."}


@strict
@dataclass(kw_only=True)
class Forward(AttentionSpec):
    slot, type = "attention", "forward"
    bidirectional = False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": Limited(), "is_decoder": True}, "'limited' has no causal form .*all tokens at once.*'dense'"),
        ({"decoder": {"attention": Limited()}, "is_encoder_decoder": True}, "'limited' has no causal form"),
        ({"per_layer_config": {1: {"attention": Limited()}}, "is_decoder": True}, "'limited' has no causal form"),
        ({"attention": Forward()}, "'forward' is causal only and cannot stand in an encoder; .*'dense'"),
        ({"attention": Forward(), "is_encoder_decoder": True}, "'forward' is causal only"),
        ({"cross_attention": Limited()}, "'limited' cannot read a memory as `cross_attention`; use 'dense'"),
        ({"attention": Limited(), "position": "rotary"}, "'rotary' rotates queries and keys.*'limited'.*sinusoidal"),
        (
            {"attention": Limited(), "position": "t5_relative_bias"},
            "'t5_relative_bias' adds a bias.*'limited'.*'dense'",
        ),
        ({"position": {"type": "rotary", "fraction": 0.3}}, "even rotated width"),
    ],
)
def test_combinations_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**{**SMALL, **fields})


def test_combinations_that_work(monkeypatch):
    XFormerConfig(**SMALL, attention=Limited())
    XFormerConfig(**SMALL, attention=Limited(), decoder={"attention": "dense"}, is_encoder_decoder=True)
    XFormerConfig(**SMALL, attention=Forward(), is_decoder=True)
    XFormerConfig(**SMALL, decoder={"attention": Forward()}, is_encoder_decoder=True)
    monkeypatch.setitem(SLOTS["attention"]._specs, "limited", Limited)
    with pytest.raises(ValueError, match="no causal form"):  # the head decides the shape, and the check runs again
        XFormerForCausalLM(XFormerConfig(**SMALL, attention=Limited()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "nystromformer"}, "'nystromformer' has no causal form"),
        ({"attention": "linear_transformer", "position": "alibi"}, "'alibi' adds a bias.*'linear_transformer'"),
        ({"num_attention_heads": 3}, "`hidden_size` 16 is not a multiple of `num_attention_heads` 3"),
    ],
)
def test_changes_of_a_saved_model_are_checked(changes, message, tmp_path):
    """transformers sets overrides one after the other in a config that is made already."""
    XFormerForCausalLM(XFormerConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        XFormerForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **changes)


# ------------------------------------------------------------------------------------------------------------- towers


def test_towers_of_one():
    for fields in ({}, {"is_decoder": True}):
        config = XFormerConfig(**SMALL, **fields)
        (tower,) = config.tower_configs()
        assert tower.is_decoder == config.is_decoder and tower.num_hidden_layers == 2
        with pytest.raises(ValueError, match="set `is_encoder_decoder=True`"):
            config.tower("decoder")


def test_towers_of_two():
    config = XFormerConfig(
        **SMALL,
        is_encoder_decoder=True,
        num_decoder_layers=5,
        decoder={"position": "rotary", "intermediate_size": 8, "feedforward": {"type": "relu", "bias": False}},
        per_layer_config={0: {"feedforward": "swiglu"}},
    )
    trunk, decoder = config.tower_configs()
    assert (trunk.is_decoder, decoder.is_decoder) == (False, True)
    assert (trunk.num_hidden_layers, decoder.num_hidden_layers) == (2, 5)
    assert (trunk.position.type, decoder.position.type) == ("learned_absolute", "rotary")
    assert (trunk.intermediate_size, decoder.intermediate_size) == (16, 8)
    assert decoder.feedforward == build_spec("feedforward", {"type": "relu", "bias": False})
    assert [trunk.layer(index).feedforward.type for index in range(2)] == ["swiglu", "gelu"]
    assert {decoder.layer(index).feedforward.type for index in range(5)} == {"relu"}  # layers of its own
    assert not config.is_decoder and config.position.type == "learned_absolute"  # views change nothing


def test_a_decoder_with_differing_layers():
    config = XFormerConfig(
        **SMALL,
        is_encoder_decoder=True,
        num_decoder_layers=3,
        decoder={"per_layer_config": {2: {"feedforward": "relu", "num_key_value_heads": 1}}},
    )
    trunk, decoder = config.tower_configs()
    assert not trunk.is_heterogeneous
    assert [decoder.layer(index).feedforward.type for index in range(3)] == ["gelu", "gelu", "relu"]
    model = XFormerForSeq2SeqLM(config)
    shapes = [tuple(layer.attention.k_proj.weight.shape) for layer in model.model.decoder.layers]
    assert shapes == [(16, 16), (16, 16), (4, 16)]
    read = XFormerConfig.from_dict(json.loads(config.to_json_string()))
    assert read.to_dict() == config.to_dict()
    assert read.tower("decoder").layer(2).feedforward.type == "relu"


def test_the_side_that_transformers_asks_for():
    """Caches are sized by this: the decoder's layers, not the encoder's, and never the dictionary of overrides."""
    config = XFormerConfig(**SMALL, is_encoder_decoder=True, num_decoder_layers=5, decoder={"position": "rotary"})
    assert config.get_text_config(decoder=True).num_hidden_layers == 5
    assert config.get_text_config() is config and config.get_text_config(encoder=True).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("head", "shape"),
    [(XFormerForMaskedLM, (False, False)), (XFormerForCausalLM, (True, False)), (XFormerForSeq2SeqLM, (False, True))],
)
def test_heads_set_the_shape(head, shape, tmp_path):
    """Whatever the config said, and without changing the caller's; the saved config says what was built."""
    for start in ({}, {"is_decoder": True}, {"is_encoder_decoder": True}):
        config = XFormerConfig(**SMALL, **start, per_layer_config={1: {"feedforward": "relu"}})
        before = copy.deepcopy(config.to_dict())
        model = head(config)
        assert config.to_dict() == before
        assert (model.config.is_decoder, model.config.is_encoder_decoder) == shape
        assert [type(module.feedforward.activation).__name__ for module in model.model.trunk.layers] == [
            "GELUActivation",
            "ReLU",
        ]
        assert [layer.attention.is_causal for layer in model.model.trunk.layers] == [shape[0]] * 2
        model.save_pretrained(tmp_path)
        saved = AutoConfig.from_pretrained(tmp_path)
        assert (saved.is_decoder, saved.is_encoder_decoder) == shape


def test_the_shape_keeps_what_the_config_knows():
    config = XFormerConfig(**SMALL, num_labels=5, id2label={n: f"label {n}" for n in range(5)})
    config._attn_implementation = "eager"
    shaped = XFormerForCausalLM(config).config
    assert shaped.id2label == config.id2label and shaped._attn_implementation == "eager"


# ------------------------------------------------------------------------------------------------- layers, serialising


def test_derived_sizes():
    config = XFormerConfig(**SMALL)
    assert (config.head_width, config.key_value_heads) == (4, 4)
    config = XFormerConfig(**SMALL, head_dim=7, num_key_value_heads=2)
    assert (config.head_width, config.key_value_heads) == (7, 2)


def test_layers_that_differ_round_trip():
    config = XFormerConfig(
        **SMALL,
        per_layer_config={
            0: {"attention": {"type": "dense", "scale": 0.5}, "num_key_value_heads": 2},
            1: {"feedforward": "relu", "num_attention_heads": 2, "intermediate_size": 8},
        },
    )
    text = config.to_json_string()
    stored = json.loads(text)["per_layer_config"]["0"]["attention"]
    assert stored.items() >= {"type": "dense", "bias": True, "scale": 0.5}.items()
    read = XFormerConfig.from_dict(json.loads(text))
    assert read.to_json_string() == text and read.is_heterogeneous
    for view in (config, read):
        first, second = view.layer(0), view.layer(1)
        assert (first.attention.scale, first.feedforward.type, first.key_value_heads) == (0.5, "gelu", 2)
        assert (second.attention.scale, second.feedforward.type, second.num_attention_heads) == (None, "relu", 2)
        assert (first.intermediate_size, second.intermediate_size) == (16, 8)
    assert read.num_hidden_layers == 2


def test_configs_are_equal_where_what_they_describe_is(tmp_path):
    """Those whose layers differ as well, which transformers cannot compare."""

    def made(window):
        layers = {1: {"attention": {"type": "sliding_window", "window_size": window}}}
        return XFormerConfig(num_hidden_layers=2, is_decoder=True, per_layer_config=layers)

    made(4).save_pretrained(tmp_path)
    assert made(4) == made(4) == XFormerConfig.from_pretrained(tmp_path)
    assert made(4) != made(5) and made(4) != XFormerConfig(num_hidden_layers=2, is_decoder=True)
    assert config_class("bert")() == config_class("bert")() != XFormerConfig()


def test_model_of_differing_layers():
    config = XFormerConfig(
        **SMALL, per_layer_config={1: {"feedforward": "swiglu", "intermediate_size": 8, "num_attention_heads": 2}}
    )
    first, second = XFormerForMaskedLM(config).model.trunk.layers
    assert first.feedforward.gate_proj is None and second.feedforward.gate_proj is not None
    assert first.feedforward.up_proj.out_features == 16 and second.feedforward.up_proj.out_features == 8
    assert (first.attention.num_heads, second.attention.num_heads) == (4, 2)


@pytest.mark.parametrize("name", ["xformer", "xf_gpt3_alternating", "xf_deberta", "xf_vision_transformer"])
def test_copies(name):
    """Pickle and deepcopy give equal configs that share nothing mutable."""
    config = config_class(name)(per_layer_config={0: {"feedforward": "relu"}})
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(again) is type(config) and again.to_dict() == config.to_dict()
        assert again.layer(0).feedforward.type == "relu"
        for slot in set(SLOTS) - {"feedforward"}:
            assert getattr(again.layer(0), slot) is not getattr(config.layer(0), slot), slot
        assert again.layer(0).feedforward is not config.layer(0).feedforward


def test_presets_can_be_changed():
    """A variant is a preset: any field and any slot can be given."""
    config = AutoConfig.for_model("xf_bert", hidden_size=32, num_attention_heads=2, position="rotary")
    assert config.position.type == "rotary" and config.embedding.normalize
    first, second = config_class("xf_bart")(), config_class("xf_bart")()
    assert first.position == second.position and first.position is not second.position


def test_foreign_keys_pass():
    """What the ecosystem adds to a config.json is no typo."""
    config = XFormerConfig(**SMALL, auto_map={"AutoModel": "x--y"}, quantization_config=None, max_length=7)
    assert config.auto_map == {"AutoModel": "x--y"}


def test_overrides_as_transformers_scripts_write_them():
    config = XFormerConfig()
    config.update_from_string("attention=performer,position=rotary,hidden_size=72,tie_word_embeddings=false")
    assert (config.attention.type, config.position.type, config.hidden_size) == ("performer", "rotary", 72)
    assert not config.tie_word_embeddings
    with pytest.raises(ValueError, match="num_attention_heads"):
        config.update_from_string("num_attention_heads=7")


OUTSIDE = [("ca_mtl", "Model"), ("memformer", "Model"), ("han_nmt", "Model"), ("deberta", "ForReplacedTokenDetection")]


@pytest.mark.parametrize("name, head", OUTSIDE)
def test_norms_outside_of_layers_have_the_shared_eps(name, head):
    """Where single layers have another one."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_attention_heads": 2, "vocab_size": 20}
    made = config_class(name)(**sizes, num_hidden_layers=2, per_layer_config={0: {"layer_norm_eps": 1e-3}})
    norms = [part for part in family(name)[head](made).modules() if isinstance(part, nn.LayerNorm)]
    assert {part.eps for part in norms} == {1e-3, made.per_layer_config[1].layer_norm_eps}


def test_positions_keep_their_number():
    """transformers' `run_summarization.py` asks for more where texts are longer."""
    model = XFormerForSeq2SeqLM(XFormerConfig(**SMALL))
    model.resize_position_embeddings(512)
    with pytest.raises(ValueError, match="texts of 512 tokens .* --max-length 1024"):
        model.resize_position_embeddings(1024)
