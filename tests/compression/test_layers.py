"""Layers: a pruned model against one whose other layers hand on what they are given, caches that are numbered anew,
losses and angles against their definitions, LayerDrop against its rate."""

import pytest
import torch
from torch import nn

from hf_xformers.compression.geometry import distance
from hf_xformers.compression.importance import layer_angles, layer_losses, skipped
from hf_xformers.compression.layers import choose_layers, least_important_layers, prune_layers
from tests.compression.models import batch, tiny
from tests.helpers import close


def test_which_layers_stay():
    assert choose_layers(6, 3, "top") == [0, 1, 2]
    assert choose_layers(6, 3, "alternate") == [0, 2, 4] and choose_layers(12, 5, "alternate") == [0, 2, 4, 7, 9]
    assert least_important_layers([0.3, 0.1, 0.3, 0.2], 2) == [0, 2]
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"--keep_layers {wrong}"):
            choose_layers(6, wrong, "top")


@pytest.mark.parametrize("fields", [{}, {"residual": "pre_ln", "position": "rotary"}], ids=["post", "pre"])
def test_a_shallower_model_is_one_whose_layers_hand_on(fields, tmp_path):
    model, inputs = tiny(**fields, per_layer_config={2: {"intermediate_size": 20}}), batch()
    pruned = prune_layers(model, {"model.trunk": [0, 2]})
    with torch.no_grad(), skipped([model.model.trunk.layers[1]]):
        expected = model(**inputs).logits
    with torch.no_grad():
        close(pruned(**inputs).logits, expected, 1e-9)
    assert pruned.config.num_hidden_layers == 2
    assert [pruned.config.layer(index).intermediate_size for index in range(2)] == [24, 20]
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path)
    with torch.no_grad():
        cache = again(inputs["input_ids"], use_cache=True).past_key_values
        assert len(cache.layers) == 2 and all(layer.keys.shape[2] == 9 for layer in cache.layers)
        close(again(**inputs).logits, expected, 1e-9)


def test_towers_lose_layers_apart():
    model = tiny("ForSeq2SeqLM", double=False)
    pruned = prune_layers(model, {"model.trunk": [1], "model.decoder": [0, 2]})
    assert (pruned.config.num_hidden_layers, pruned.config.num_decoder_layers) == (1, 2)
    alone = prune_layers(model, {"model.trunk": [1, 2]})
    assert (alone.config.num_hidden_layers, alone.config.num_decoder_layers) == (2, 3)


def test_the_loss_and_the_angle_of_a_layer():
    model, inputs = tiny(), batch()
    tower = model.model.trunk
    base, without = layer_losses(model, tower, [inputs])
    with torch.no_grad():
        assert base == pytest.approx(float(model(**inputs).loss), rel=1e-9)
        for index, found in enumerate(without):
            kept = [other for other in range(3) if other != index]
            assert found == pytest.approx(float(prune_layers(model, {"model.trunk": kept})(**inputs).loss), rel=1e-9)
        states = model(**inputs, output_hidden_states=True).hidden_states
    angles = layer_angles(model, tower, [inputs])
    mask = inputs["attention_mask"].bool()
    for index, found in enumerate(angles):
        cosine = nn.functional.cosine_similarity(states[index], states[index + 1], dim=-1)[mask]
        assert found == pytest.approx(float((torch.acos(cosine) / torch.pi).mean()), rel=1e-6)


def test_padding_of_a_decoder_turns_no_angle():
    model, inputs = tiny("ForSeq2SeqLM"), batch()
    longer = {**inputs, "labels": nn.functional.pad(inputs["labels"], (0, 5), value=-100)}
    one, other = (layer_angles(model, model.model.decoder, [given]) for given in (inputs, longer))
    assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stack": "universal"}, "runs 1 layers at 3 depths"),
        ({"distinct_layers": 1}, "runs 1 layers at 3 depths"),
        ({"stack": "feedback", "attention": "feedback", "position": "none"}, "place of a layer counts|shape"),
    ],
)
def test_layers_whose_place_counts_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        prune_layers(tiny(double=False, **fields), {"model.trunk": [0, 1]})
    with pytest.raises(ValueError, match="no tower 'trunk'; it has 'model.trunk'"):
        prune_layers(tiny(double=False, **fields), {"trunk": [0, 1]})


def test_layer_drop_leaves_layers_out_in_training_alone():
    model = tiny(layer_drop=0.4, double=False)
    inputs = {"input_ids": batch()["input_ids"]}
    plain = tiny(double=False)
    with torch.no_grad():
        close(model(**inputs).logits, plain(**inputs).logits, 1e-6)
        torch.manual_seed(0)
        found = [_depth(model.train(), inputs) for _ in range(300)]
    spread = (0.4 * 0.6 / (3 * 300)) ** 0.5
    assert sum(found) / (3 * 300) == pytest.approx(0.6, abs=4 * spread)
    with torch.no_grad():
        gone = tiny(layer_drop=0.0, double=False).train()
        assert _depth(gone, inputs) == 3


def _depth(model, inputs) -> int:
    """How many layers ran their attention."""
    seen = []
    hooks = [layer.attention.register_forward_hook(lambda *_: seen.append(1)) for layer in model.model.trunk.layers]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return len(seen)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"stack": "reversible", "residual": "pre_ln"},
            "stack 'reversible' does not run its layers one after the other",
        ),
        ({"attention": "realformer"}, "attention 'realformer' as it is set hands tensors from layer to layer"),
        ({"layer_drop": 1.0}, r"`layer_drop` is a probability in \[0, 1\)"),
    ],
)
def test_layer_drop_is_refused_where_a_layer_would_be_missed(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"layer_drop": 0.2, **fields})


def test_gradients_through_checkpointing_are_those_of_the_same_draw():
    model, inputs = tiny(layer_drop=0.5).train(), batch()
    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        model(**inputs).loss.backward()
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    dropped = [name for name, gradient in found[0].items() if gradient is None]
    assert any("layers" in name for name in dropped)
    for name, gradient in found[0].items():
        if gradient is not None:
            close(found[1][name], gradient, 1e-9)


def test_dropped_layers_can_go(tmp_path):
    """A model that was trained with LayerDrop gives its own shallower one."""
    model = tiny(layer_drop=0.3, double=False)
    pruned = prune_layers(model, {"model.trunk": [0, 1]})
    assert pruned.config.layer_drop == 0.3
    assert distance(model, pruned) > 1e-3
