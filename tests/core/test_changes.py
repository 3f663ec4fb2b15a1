"""Changes on top of what is there, through one function for all commands."""

import pytest

from hf_xformers import build_spec
from hf_xformers.core.changes import changed_component, class_of_change, components_of, merge_changes
from hf_xformers.variants import config_class

T5_ATTENTION = {"type": "dense", "scale": 1.0, "bias": False}


def whole(slot, **fields):
    return build_spec(slot, fields).to_dict()


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"bias": True}, {**T5_ATTENTION, "bias": True}),
        ({"type": "dense", "bias": True}, {**T5_ATTENTION, "bias": True}),
        ("dense", T5_ATTENTION),
        ({}, T5_ATTENTION),
        ("linformer", {"type": "linformer"}),  # another type keeps nothing
        ({"type": "longformer", "window": 8}, {"type": "longformer", "attention_window": 8}),
        (build_spec("attention", "dense"), {"type": "dense"}),  # a spec is complete
    ],
)
def test_one_component(given, expected):
    assert changed_component("attention", given, T5_ATTENTION) == whole("attention", **expected)


def test_aliases_of_fields_replace_the_field():
    before = {"type": "longformer", "attention_window": 8, "bias": False}
    assert changed_component("attention", {"window": 4}, before) == whole(
        "attention", **{**before, "attention_window": 4}
    )


def test_another_type_may_take_over():
    changed = changed_component(
        "attention", "linformer", T5_ATTENTION, take_over=lambda before, cls: {"bias": before.bias}
    )
    assert changed == whole("attention", type="linformer", bias=False)


@pytest.mark.parametrize(
    "slot, given, error, message",
    [
        ("attentoin", "dense", ValueError, "unknown slot 'attentoin'"),
        ("attention", "dens", ValueError, "Unknown attention component 'dens'. Did you mean 'dense'"),
        ("attention", {"type": 3}, ValueError, "needs a string under 'type'"),
        ("attention", 3, TypeError, "must be a name, a dict or a spec, got int"),
        ("attention", {"bais": True}, ValueError, "Unknown field 'bais' of attention 'dense'. Did you mean 'bias'"),
    ],
)
def test_refusals(slot, given, error, message):
    with pytest.raises(error, match=message):
        changed_component(slot, given, T5_ATTENTION)


def test_the_class_that_a_change_is_about():
    assert class_of_change("attention", {"bias": True}, T5_ATTENTION).type == "dense"
    assert class_of_change("attention", "linformer", T5_ATTENTION).type == "linformer"


def test_decoder_and_layers_change_what_is_below_them():
    fields = {**components_of(config_class("t5")), "decoder": {"position": "none", "hidden_dropout_prob": 0.3}}
    changes = {
        "attention": {"bias": True},
        "decoder": {"attention": {"scale": 2.0}, "per_layer_config": {1: {"position": "rotary", "attention": {}}}},
        "per_layer_config": {0: {"attention": {"scale": None}, "hidden_dropout_prob": 0.1}},
        "hidden_size": 8,
    }
    merged = merge_changes(fields, changes)
    own = {"type": "dense", "bias": True, "scale": 1.0}
    assert merged["attention"] == whole("attention", **own) and merged["hidden_size"] == 8
    assert set(merged) == set(changes)
    decoder = merged["decoder"]
    assert decoder["position"] == "none" and decoder["hidden_dropout_prob"] == 0.3
    assert decoder["attention"] == whole("attention", **{**own, "scale": 2.0})
    layer = decoder["per_layer_config"][1]
    assert layer["attention"] == whole("attention", **{**own, "scale": 2.0}) and layer["position"]["type"] == "rotary"
    assert merged["per_layer_config"][0] == {
        "attention": whole("attention", **{**own, "scale": None}),
        "hidden_dropout_prob": 0.1,
    }
    assert fields["decoder"] == {"position": "none", "hidden_dropout_prob": 0.3}


def test_options_keep_what_a_variant_s_decoder_has():
    """Linformer's decoder is dense; another option for the decoder must not undo that."""
    from hf_xformers.objectives import build_objective
    from hf_xformers.training.building import build_config

    fields = {"decoder": {"hidden_dropout_prob": 0.0}}
    config = build_config(config_class("linformer"), "tiny", build_objective("span"), fields=fields)
    decoder = config.tower("decoder")
    assert decoder.attention.type == "dense" and decoder.hidden_dropout_prob == 0.0
    assert config.attention.type == "linformer"
